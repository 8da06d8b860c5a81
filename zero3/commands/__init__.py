"""What `python -m zero3` does, a file for each subcommand."""
