"""Transfers between processes of one host, through memory that all of them see."""
