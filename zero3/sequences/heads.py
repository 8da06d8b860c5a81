"""Which rank computes which heads of an attention. Integers only."""

from __future__ import annotations

from collections.abc import Sequence

__all__: list[str] = []

Heads = tuple[tuple[int, ...], ...]  # for each rank, in the ranks' order


def query_heads(count: int, ranks: int) -> Heads:
    """Equal numbers of consecutive heads. Raises ValueError if they can't be divided."""
    if count % ranks:
        raise ValueError(
            f"sequence parallelism over {ranks} ranks (sp) divides the heads of attention, and "
            f"this one has {count} query heads: take an sp that divides them"
        )
    each = count // ranks
    return tuple(tuple(range(rank * each, rank * each + each)) for rank in range(ranks))


def key_heads(queries: Heads, count: int) -> Heads:
    """The key heads that these query heads attend to, if there are `count` of them. Several ranks
    may need one.
    """
    group = sum(map(len, queries)) // count
    return tuple(tuple(dict.fromkeys(head // group for head in own)) for own in queries)


def repeats(own: Sequence[int], keys: Sequence[int], count: int, queries: int) -> list[int] | None:
    """For each query head of a rank the place of its key head among `keys`. None: as many query
    heads in a row belong to each of them, which is what attentions take.
    """
    group = queries // count
    places = [keys.index(head // group) for head in own]
    each, rest = divmod(len(own), len(keys))
    even = not rest and places == [place for place in range(len(keys)) for _ in range(each)]
    return None if even else places
