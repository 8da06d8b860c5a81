"""Sharded models in and out of memory and files."""
