"""Sizes and rates as people write them, and as they are shown."""

from __future__ import annotations

import pytest

from zero3.planning.units import gib, meant, parse_bytes, parse_rate


@pytest.mark.parametrize("card", [16, 24, 32, 40, 48, 80, 96, 141, 192])
def test_memory_of_a_card_is_what_it_offers(card: int) -> None:
    """Less than so many GiB, and named in the output; GiB are exact, and other GB are said to be 10^9 bytes."""
    for text in (f"{card}GB", f" {card} GB ", f"{card}G", f"{card} gb"):
        assert 0.88 * card < parse_bytes(text, "memory") / 2**30 <= card and meant(text) == f"what a card of {card} GB offers"
    assert parse_bytes(f"{card}GiB", "memory") == card * 2**30 and meant(f"{card}GiB") == meant(card * 10**9) == ""


def test_other_sizes_are_what_they_say() -> None:
    assert parse_bytes("80GB", "memory") == int(79.1 * 2**30)
    assert meant("81GB") == "GB are 10^9 bytes" and meant("7 MB") == "MB are 10^6 bytes" and meant("512") == ""


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * 2**30),
        ("81GB", 81 * 10**9),
        ("80.0GB", 80 * 10**9),
        ("1.5 MiB", 3 * 2**19),
        (512, 512),
        ("512", 512),
        ("7kB", 7000),
        ("24gib", 24 * 2**30),
    ],
)
def test_bytes_are_read_as_people_write_them(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text, "memory") == nbytes


@pytest.mark.parametrize(("text", "rate"), [("400Gbit", 50e9), ("400Gbit/s", 50e9), ("50GB", 50e9), ("1.6Tbit", 200e9), ("100Mbps", 0)])
def test_rates_are_read_as_people_write_them(text: str, rate: float) -> None:
    if rate:
        assert parse_rate(text, "link") == rate
    else:
        with pytest.raises(ValueError, match="link must be a rate such as 400Gbit"):
            parse_rate(text, "link")


def test_bytes_are_shown_as_people_read_them() -> None:
    assert [gib(n) for n in (0, 2000, 3 * 2**20, 5 * 2**29)] == ["0 B", "1.95 KiB", "3.00 MiB", "2.50 GiB"]
