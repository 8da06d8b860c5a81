"""Which rank computes which heads: integers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero3.sequences.heads import key_heads, query_heads, repeats


@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_sequence_heads_attend_to_their_own_keys(ranks: int, each: int, data: st.DataObject) -> None:
    queries = ranks * each
    keys = data.draw(st.sampled_from([n for n in range(1, queries + 1) if queries % n == 0]))
    owned, needed = query_heads(queries, ranks), key_heads(query_heads(queries, ranks), keys)
    assert sorted(head for own in owned for head in own) == list(range(queries))
    assert {head for own in needed for head in own} == set(range(keys))
    for own, theirs in zip(owned, needed, strict=True):
        assert len(set(theirs)) == len(theirs)
        assert set(theirs) == {head // (queries // keys) for head in own}  # what it needs, and no more
        places = repeats(own, theirs, keys, queries)
        group = len(own) // len(theirs)
        for place, head in enumerate(own):
            key = theirs[places[place]] if places is not None else theirs[place // group]
            assert key == head // (queries // keys)


def test_sequence_heads_have_to_be_divisible() -> None:
    with pytest.raises(ValueError, match=r"3 ranks .* 4 query heads"):
        query_heads(4, 3)
