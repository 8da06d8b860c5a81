"""The subcommands of `python -m zero3`, a file for each."""
