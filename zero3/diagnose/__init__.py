"""Tells how much memory a sharded model takes, what it waits for, and whether its results are
right.
"""
