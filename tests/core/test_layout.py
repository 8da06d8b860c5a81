"""Where every element lies: properties of ChunkLayout (integers) and of the flat buffers laid out by it (tensors)."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from zero3.core.flat import not_a_number, split, unpack, view, zero_padding
from zero3.core.layout import ALIGNMENT_NUMEL, ChunkLayout, Slot

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.bool]

# Scalars, empty tensors, tensors smaller than the world, and lengths on both sides of the alignment.
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple) | st.integers(0, 40).map(lambda n: (n,))
world_sizes = st.integers(1, 9)


@st.composite
def layouts(draw: st.DrawFn) -> ChunkLayout:
    found = draw(st.lists(shapes, max_size=8))
    return ChunkLayout.build([(f"p{i}", shape) for i, shape in enumerate(found)], draw(world_sizes))


def distinct(numel: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Values that tell elements apart as far as the dtype can."""
    return (torch.arange(start, start + numel) % 251).to(dtype)


@given(layouts())
def test_slots_cover_the_parameters_without_gap_or_overlap(layout: ChunkLayout) -> None:
    owners = [0] * layout.padded_numel
    for slot in layout.slots:
        for element in range(slot.offset, slot.stop):
            owners[element] += 1
    assert owners == [1] * layout.numel + [0] * (layout.padded_numel - layout.numel)
    assert [slot.offset for slot in layout.slots] == sorted(slot.offset for slot in layout.slots)


@given(layouts())
def test_every_element_has_one_rank_and_chunks_are_equal(layout: ChunkLayout) -> None:
    ranges = [layout.chunk_range(rank) for rank in range(layout.world_size)]
    assert [element for low, high in ranges for element in range(low, high)] == list(range(layout.padded_numel))
    assert {high - low for low, high in ranges} == {layout.shard_numel}


@given(layouts())
def test_padding_is_less_than_one_element_a_rank(layout: ChunkLayout) -> None:
    assert layout.numel == sum(math.prod(slot.shape) for slot in layout.slots)
    assert 0 <= layout.padded_numel - layout.numel < layout.world_size


@given(layouts())
def test_pieces_cover_each_parameter_once_and_agree_with_the_chunks(layout: ChunkLayout) -> None:
    covered: dict[str, list[int]] = {slot.name: [] for slot in layout.slots}
    for rank in range(layout.world_size):
        end = 0
        for piece in layout.pieces(rank):
            assert piece.start < piece.stop, "an empty piece"
            assert piece.offset == end, "the pieces of a chunk leave a gap"
            end = piece.offset + piece.stop - piece.start
            assert layout.chunk_range(rank)[0] + piece.offset == piece.slot.offset + piece.start
            covered[piece.slot.name] += range(piece.start, piece.stop)
        assert end == min(layout.shard_numel, max(0, layout.numel - layout.chunk_range(rank)[0]))
    assert covered == {slot.name: list(range(slot.numel)) for slot in layout.slots}


@given(st.lists(shapes, max_size=8), world_sizes)
def test_aligned_lengths_come_first_and_the_order_is_kept_otherwise(found: list[tuple[int, ...]], world_size: int) -> None:
    named = [(f"p{i}", shape) for i, shape in enumerate(found)]
    names = [slot.name for slot in ChunkLayout.build(named, world_size).slots]
    aligned = [name for name, shape in named if math.prod(shape) % ALIGNMENT_NUMEL == 0]
    assert names == aligned + [name for name, _ in named if name not in aligned]
    for slot in ChunkLayout.build(named, world_size).slots:
        assert slot.name not in aligned or slot.offset % ALIGNMENT_NUMEL == 0


@given(layouts(), st.integers(1, 9))
def test_the_world_size_changes_the_cuts_only(layout: ChunkLayout, world_size: int) -> None:
    assert ChunkLayout.build([(s.name, s.shape) for s in layout.slots], world_size).slots == layout.slots


@given(layouts(), st.sampled_from(DTYPES))
def test_unpack_makes_views_of_what_lies_side_by_side(layout: ChunkLayout, dtype: torch.dtype) -> None:
    tensors = [distinct(slot.numel, dtype, start=17 * i + 1).view(slot.shape) for i, slot in enumerate(layout.slots)]
    padding = torch.full((layout.padded_numel - layout.numel,), 99).to(dtype)
    full = torch.cat([*(tensor.flatten() for tensor in tensors), padding])
    for tensor, slot, found in zip(tensors, layout.slots, unpack(full, layout), strict=True):
        assert found.shape == slot.shape and found.dtype == dtype and found.is_contiguous()
        assert torch.equal(found, tensor)
        assert not found.numel() or found.data_ptr() == full.data_ptr() + slot.offset * full.element_size()
    zero_padding(full, layout)
    assert not full[layout.numel :].any(), "padding is not zero"


@given(layouts())
def test_split_makes_one_view_a_rank(layout: ChunkLayout) -> None:
    full = distinct(layout.padded_numel, torch.float64)
    chunks = split(full, layout)
    assert len(chunks) == layout.world_size and {chunk.shape for chunk in chunks} == {(layout.shard_numel,)}
    assert torch.equal(torch.cat(chunks), full)
    full.fill_(-1)
    assert all((chunk == -1).all() for chunk in chunks)


@given(layouts())
def test_zero_padding_touches_nothing_else(layout: ChunkLayout) -> None:
    full = torch.ones(layout.padded_numel)
    zero_padding(full, layout)
    assert full.tolist() == [1.0] * layout.numel + [0.0] * (layout.padded_numel - layout.numel)


def reshard(chunks: list[torch.Tensor], old: ChunkLayout, new: ChunkLayout) -> list[torch.Tensor]:
    """As a checkpoint does that is loaded at another world size: pieces out of old chunks, pieces into new ones."""
    tensors = {slot.name: torch.full((slot.numel,), -1, dtype=torch.int64) for slot in old.slots}
    for rank, chunk in enumerate(chunks):
        for piece in old.pieces(rank):
            tensors[piece.slot.name][piece.start : piece.stop] = chunk[piece.offset : piece.offset + piece.stop - piece.start]
    resharded = [torch.zeros(new.shard_numel, dtype=torch.int64) for _ in range(new.world_size)]
    for rank, chunk in enumerate(resharded):
        for piece in new.pieces(rank):
            chunk[piece.offset : piece.offset + piece.stop - piece.start] = tensors[piece.slot.name][piece.start : piece.stop]
    return resharded


@given(layouts(), world_sizes)
def test_resharding_through_pieces_and_back_is_the_identity(layout: ChunkLayout, world_size: int) -> None:
    other = ChunkLayout.build([(slot.name, slot.shape) for slot in layout.slots], world_size)
    full = zero_padding(torch.arange(1, layout.padded_numel + 1), layout)
    there = reshard(split(full, layout), layout, other)
    assert torch.equal(torch.cat(there)[: other.numel], full[: layout.numel])
    assert not torch.cat(there)[other.numel :].any()
    assert torch.equal(torch.cat(reshard(there, other, layout)), full)


@pytest.mark.parametrize("world_size", [1, 2, 3, 9])
def test_edges(world_size: int) -> None:
    nothing = ChunkLayout.build([], world_size)
    assert (nothing.numel, nothing.shard_numel, nothing.padded_numel) == (0, 0, 0)
    assert all(not nothing.pieces(rank) for rank in range(world_size))
    empty = ChunkLayout.build([("a", (0,)), ("b", (3, 0))], world_size)
    assert empty.padded_numel == 0 and [view(torch.empty(0), empty, i).shape for i in (0, 1)] == [(0,), (3, 0)]
    scalar = ChunkLayout.build([("a", ())], world_size)
    assert (scalar.shard_numel, scalar.padded_numel) == (1, world_size)
    assert [len(scalar.pieces(rank)) for rank in range(world_size)] == [1] + [0] * (world_size - 1)


@given(layouts(), st.data())
def test_a_layout_with_a_slot_out_of_place_is_refused(layout: ChunkLayout, data: st.DataObject) -> None:
    assume(layout.slots)
    index = data.draw(st.integers(0, len(layout.slots) - 1))
    shift = data.draw(st.sampled_from([-3, -1, 1, 5]))
    slots = list(layout.slots)
    slots[index] = Slot(slots[index].name, slots[index].shape, slots[index].offset + shift)
    with pytest.raises(ValueError, match="must not overlap or leave gaps") as caught:
        ChunkLayout(tuple(slots), layout.world_size)
    assert repr(slots[index].name) in str(caught.value)


@pytest.mark.parametrize("world_size", [0, -1])
def test_a_world_without_ranks_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"world_size must be at least 1, found {world_size}"):
        ChunkLayout.build([("a", (2,))], world_size)


def test_two_slots_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="share a name"):
        ChunkLayout.build([("a", (2,)), ("a", (3,))], 2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_stand_in_is_loud_where_its_dtype_can_be(dtype: torch.dtype) -> None:
    value = not_a_number(dtype, torch.device("cpu"))
    assert value.shape == () and value.dtype == dtype
    assert bool(value.isnan()) == (dtype.is_floating_point or dtype.is_complex)
