"""Faults put into a copy of the package: which places there are, which tests run them, and what the tests say. See tests/mutants.py."""
