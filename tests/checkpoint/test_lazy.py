"""Tensors put together from pieces and blocks, read by any ranges."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero3.checkpoint.lazy import Lazy, as_lazy, assembled, fills, joined


def check(lazy: Lazy, expected: Tensor, data: Any) -> None:
    """As a whole, and any range of it."""
    assert torch.equal(lazy.tensor(), expected)
    start = data.draw(st.integers(0, expected.numel()))
    into = torch.empty(data.draw(st.integers(0, expected.numel() - start)))
    lazy.read(start, into)
    assert torch.equal(into, expected.reshape(-1)[start : start + into.numel()])


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.data())
def test_blocks_of_any_dimensions(shape: list[int], data: Any) -> None:
    whole = torch.randn(shape)
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    blocks = [((), as_lazy(whole))] if not shape else []
    places: list[list[tuple[int, int]]] = [[]]
    for ends in cuts:
        places = [[*place, pair] for place in places for pair in itertools.pairwise(ends)]
    for place in data.draw(st.permutations(places)):
        values = whole[tuple(slice(*pair) for pair in place)]
        blocks.append((tuple(first for first, _ in place), as_lazy(values)))
    check(assembled(torch.float32, tuple(shape), blocks), whole, data)


@given(st.lists(st.integers(0, 3), max_size=3).map(tuple), st.data())
def test_blocks_fill_a_tensor_if_each_element_is_in_one(shape: tuple[int, ...], data: Any) -> None:
    """The count of each element tells."""
    blocks = data.draw(st.lists(st.tuples(*[st.tuples(*(st.integers(0, 3) for _ in shape))] * 2), max_size=4))
    if data.draw(st.booleans()):  # cut it, so that it is filled
        ends = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
        cut = itertools.product(*map(itertools.pairwise, ends))
        blocks = [(tuple(a for a, _ in place), tuple(b - a for a, b in place)) for place in cut]
    counts = torch.zeros([6] * len(shape))
    for begin, size in blocks:
        counts[tuple(slice(a, a + b) for a, b in zip(begin, size, strict=True))] += 1
    inside = torch.zeros([6] * len(shape))
    inside[tuple(slice(size) for size in shape)] = 1
    beyond = any(a + b > size for begin, sizes in blocks for a, b, size in zip(begin, sizes, shape, strict=True))
    assert fills(shape, blocks) == (torch.equal(counts, inside) and not beyond)


def test_a_number_is_a_block() -> None:
    assert assembled(torch.float32, (), [((), as_lazy(torch.tensor(3.0)))]).tensor() == 3


@given(st.integers(0, 20), st.integers(1, 5), st.data())
def test_pieces_with_padding(numel: int, ranks: int, data: Any) -> None:
    whole, length = torch.randn(numel), -(-numel // ranks)
    pieces = [as_lazy(whole).part(rank * length, (rank + 1) * length) for rank in range(ranks)]
    flat = torch.cat([piece.tensor() for piece in pieces])
    assert not flat[numel:].any()
    check(joined(torch.float32, (numel,), pieces), whole, data)


def test_pieces_are_a_few_megabytes() -> None:
    whole = torch.randn(3 << 20)
    sizes = [len(piece) for piece in as_lazy(whole).pieces()]
    assert sizes == [4 << 20] * 3
    assert b"".join(map(bytes, as_lazy(whole).pieces())) == whole.numpy().tobytes()
