"""Who stands between a model and its collectives, if not nobody: gates (core/coordination.py)."""
