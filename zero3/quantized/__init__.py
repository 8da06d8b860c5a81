"""Formats in which frozen parameters are stored in four or eight bits, and the operations that
compute with them.
"""
