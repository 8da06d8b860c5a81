"""How chunks and gradients travel if it is not as they are."""
