"""Support for torch's `Join`, under which ranks have different numbers of batches."""
