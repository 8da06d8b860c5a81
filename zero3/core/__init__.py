"""A training step of a sharded model, from its layout in memory to the order of its transfers."""
