"""Experts stay on the ranks that own them, and tokens travel."""
