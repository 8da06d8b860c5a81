"""Long sequences: the head by chunks, modules by tiles, and parts of sequences over ranks."""
