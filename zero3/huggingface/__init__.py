"""Hugging Face directories: loaded into a sharded model, and written from one."""
