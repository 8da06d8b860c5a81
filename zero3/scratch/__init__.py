"""Files without a name, as memory that the kernel may write to a disk."""
