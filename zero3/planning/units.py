"""Bytes and rates, as people write and read them."""

from __future__ import annotations

import math
import re

__all__: list[str] = []

_PREFIXES = ("", "k", "M", "G", "T", "P")
_MOST = 2**60


def parse_bytes(text: str | float, name: str, *, least: int = 1) -> int:
    """`"24GiB"`, `"80 GB"` or a number of bytes. `name`: what has this value, for errors.

    Raises:
        TypeError: It is neither text nor a number.
        ValueError: It is none of these, less than `least`, or more than there is anywhere.
    """
    if not isinstance(text, str | int | float) or isinstance(text, bool):
        raise TypeError(f"{name} must be bytes such as '24GiB' or 25769803776, found {text!r}")
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGTP]?)(i?)B?\s*", str(text))
    scale = (1024 if found[3] else 1000) ** _PREFIXES.index(found[2]) if found else 0
    if found is None or (found[3] and not found[2]) or not least <= float(found[1]) * scale < _MOST:
        raise ValueError(f"{name} must be bytes such as 24GiB, 80GB or 25769803776, found {text!r}")
    return int(float(found[1]) * scale)


def parse_rate(text: str, name: str) -> float:
    """`"400Gbit"`, `"400Gbit/s"` or `"50GB"` a second, in bytes a second. `name`: what has this value, for errors.

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(bit|B)(?:/s)?\s*", text)
    if found is None or not 0 < float(found[1]) < math.inf:
        raise ValueError(f"{name} must be a rate such as 400Gbit or 50GB (a second), found {text!r}")
    scale: float = 10.0 ** (3 * _PREFIXES.index(found[2]))
    return float(found[1]) * scale / (8 if found[3] == "bit" else 1)


def gib(nbytes: float) -> str:
    """For people: `17.25 GiB`, `3.1 MiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes:.0f} B"
