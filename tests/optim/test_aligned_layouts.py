"""Where chunks are cut for optimizers whose state is quantised in blocks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from zero3.core.layout import ChunkLayout
from zero3.optim.cuts import aligned

# n, and a length: about a third is cut, a third is a multiple but short, the others are no multiple
SLOT = st.sampled_from([0, 2, 4, 16]).flatmap(
    lambda n: st.tuples(st.just(n), st.one_of(st.integers(0, 200).map(lambda k: k * max(n, 1)), st.integers(0, 3000)))
)


def laid_out(found: list[tuple[int, int]], world_size: int, loads: list[int] | None = None) -> ChunkLayout:
    return aligned([(f"p{i}", (numel,), n) for i, (n, numel) in enumerate(found)], world_size, loads or [0] * world_size)


def is_cut(n: int, numel: int) -> bool:
    return not n or (numel % n == 0 and numel >= 32 * n)


@given(st.lists(SLOT, max_size=8), st.integers(1, 6))
def test_pieces_have_the_blocks_of_the_whole(found: list[tuple[int, int]], world_size: int) -> None:
    layout = laid_out(found, world_size)
    assert sorted((slot.name, slot.shape) for slot in layout.slots) == sorted((f"p{i}", (numel,)) for i, (_, numel) in enumerate(found))
    assert sum(layout.chunk_numel(rank) for rank in range(world_size)) == sum(numel for _, numel in found)
    for rank in range(world_size):
        for piece in layout.pieces(rank):
            n, numel = found[int(piece.slot.name[1:])]
            if not is_cut(n, numel):
                assert (piece.start, piece.stop) == (0, numel)
            elif n and (piece.start, piece.stop) != (0, numel):
                assert piece.start % n == piece.stop % n == 0
                assert piece.stop - piece.start >= 16 * n


@given(st.lists(SLOT, max_size=8), st.integers(1, 6))
def test_ranks_hold_about_as_much(found: list[tuple[int, int]], world_size: int) -> None:
    layout = laid_out(found, world_size)
    held = [layout.chunk_numel(rank) for rank in range(world_size)]
    uncut = sum(numel for n, numel in found if not is_cut(n, numel))
    assert max(held) - min(held) <= 32 * max([n for n, _ in found], default=0) + uncut + 1


@given(st.integers(1, 64), st.integers(2, 6), st.integers(32, 4000))
def test_one_long_parameter_is_cut_evenly(n: int, world_size: int, blocks: int) -> None:
    layout = laid_out([(n, n * blocks)], world_size)
    held = [layout.chunk_numel(rank) for rank in range(world_size)]
    if blocks >= 32 * world_size:
        assert max(held) - min(held) <= 2 * n
    assert max(held) - min(held) <= 32 * n
    assert math.gcd(*held) % n == 0


@given(st.lists(st.integers(0, 100), min_size=1, max_size=4))
def test_what_is_not_cut_goes_to_whoever_has_least(loads: list[int]) -> None:
    layout = laid_out([(256, 37)], len(loads), loads)
    assert layout.chunk_numel(loads.index(min(loads))) == 37


def test_without_n_cuts_are_where_they_are_otherwise() -> None:
    shapes = [("a", (30,)), ("b", (7, 5)), ("c", (6,))]
    plain = ChunkLayout.build(shapes, 3)
    layout = aligned([(*shape, 0) for shape in shapes], 3, [0, 0, 0])
    assert [layout.chunk_range(rank)[0] for rank in range(3)] == [plain.chunk_range(rank)[0] for rank in range(3)]
