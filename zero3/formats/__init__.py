"""Other systems' checkpoints, read and written parameter by parameter."""
