"""Ranks that have different numbers of batches, in torch's Join."""
