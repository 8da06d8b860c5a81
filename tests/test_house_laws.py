"""The laws that are not kept everywhere yet: nobody else breaks one, and what was mended leaves its list (tests/house_laws.py)."""

from __future__ import annotations

import pytest

from tests.house_laws import LAWS, allowed, broken


@pytest.mark.parametrize("law", LAWS)
def test_law_of_the_house(law: str) -> None:
    found, listed = broken(law), allowed(law)
    worse = {place: count for place, count in found.items() if count > listed.get(place, 0)}
    assert not worse, f"{law.replace('_', ' ')}: {worse}"
    mended = [place for place, count in listed.items() if found.get(place, 0) < count]
    assert not mended, f"strike them out by `python -m tests.house_laws`: {mended}"
