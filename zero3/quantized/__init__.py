"""Formats of four and eight bits: how numbers are put into bytes, and read out of them."""
