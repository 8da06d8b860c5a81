"""What parameters are if they are no views of a full buffer."""
