"""Bytes and rates, as people write and read them."""

from __future__ import annotations

import re

__all__: list[str] = []

_PREFIXES = ("", "k", "M", "G", "T", "P")


def parse_bytes(text: str | int) -> int:
    """`"24GiB"`, `"80 GB"` or a number of bytes.

    Raises:
        ValueError: It is none of these, or not positive.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGTP]?)(i?)B?\s*", str(text))
    if found is None or isinstance(text, bool) or (found[3] and not found[2]) or not float(found[1]):
        raise ValueError(f"expected bytes such as 24GiB, 80GB or 25769803776, found {text!r}")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _PREFIXES.index(found[2]))


def parse_rate(text: str) -> float:
    """`"400Gbit"`, `"400Gbit/s"` or `"50GB"` a second, in bytes a second.

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(bit|B)(?:/s)?\s*", text)
    if found is None or not float(found[1]):
        raise ValueError(f"expected a rate such as 400Gbit or 50GB (a second), found {text!r}")
    scale: float = 10.0 ** (3 * _PREFIXES.index(found[2]))
    return float(found[1]) * scale / (8 if found[3] == "bit" else 1)


def gib(nbytes: float) -> str:
    """For people: `17.25 GiB`, `3.1 MiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes:.0f} B"
