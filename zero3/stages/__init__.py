"""What a gradient's way has beside the usual."""
