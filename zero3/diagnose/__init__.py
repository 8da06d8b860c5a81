"""Tells what a sharded model holds, computes and waits for."""
