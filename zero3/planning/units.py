"""Bytes and rates, as people write and read them."""

from __future__ import annotations

import math
import re
from types import MappingProxyType

from ..comm.plain_values import integer

__all__: list[str] = []

_PREFIXES = ("", "K", "M", "G", "T", "P")
_MOST = 2**60
# What cards offer that are sold as of so many GB: the GiB that torch shows, and the fewest where
# cards of one name differ.
CARDS = MappingProxyType(
    {16: 14.5, 24: 22.0, 32: 31.3, 40: 39.3, 48: 44.3, 80: 79.1, 96: 94.5, 141: 139.7, 192: 178.3}
)


def parse_bytes(text: str | float, name: str, *, least: int = 1) -> int:
    """`"24GiB"`, `"7 GB"` (of 10^9 bytes), `"80GB"`, `"80G"` or `"80 gb"` (a card's name: what it
    offers) or a number of bytes. Capitals don't count. `name`: what it is, for errors.

    Raises:
        TypeError: It is neither text nor a number.
        ValueError: It is none of these, less than `least`, or more than there is anywhere.
    """
    given: object = text  # a user may pass anything
    if not isinstance(given, str | float) and integer(given) is None:
        raise TypeError(f"{name} must be bytes such as '24GiB' or 25769803776, found {text!r}")
    if (card := _card(text)) is not None:
        return int(CARDS[card] * 2**30)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?)(I?)B?\s*", str(text).upper())
    scale = (1024 if found[3] else 1000) ** _PREFIXES.index(found[2]) if found else 0
    if found is None or (found[3] and not found[2]) or not least <= float(found[1]) * scale < _MOST:
        raise ValueError(f"{name} must be bytes such as 24GiB, 80GB or 25769803776, found {text!r}")
    return int(float(found[1]) * scale)


def meant(text: str | float) -> str:
    """How `parse_bytes` understands it, where that is not plain."""
    if (card := _card(text)) is not None:
        return f"what a card of {card} GB offers"
    decimal = re.search(r"([KMGTP])B?\s*$", str(text).upper())
    return f"{decimal[1]}B are 10^{3 * _PREFIXES.index(decimal[1])} bytes" if decimal else ""


def _card(text: str | float) -> int | None:
    found = re.fullmatch(r"\s*(\d+)\s*GB?\s*", str(text).upper())
    return int(found[1]) if found is not None and int(found[1]) in CARDS else None


def parse_rate(text: str, name: str) -> float:
    """`"400Gbit"`, `"400Gbit/s"` or `"50GB"` a second, in bytes a second. `name`: what has this
    value, for errors.

    Raises:
        ValueError: It is none of these.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(bit|B)(?:/s)?\s*", text)
    if found is None or not 0 < float(found[1]) < math.inf:
        raise ValueError(
            f"{name} must be a rate such as 400Gbit or 50GB (a second), found {text!r}"
        )
    scale: float = 10.0 ** (3 * _PREFIXES.index(found[2].upper()))
    return float(found[1]) * scale / (8 if found[3] == "bit" else 1)


def gib(nbytes: float) -> str:
    """For people: `17.25 GiB`, `3.1 MiB`."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{nbytes / unit:.2f} {name}"
    return f"{nbytes:.0f} B"
