"""Who stands between a model and its collectives, if not nobody (core/collectives.py)."""
