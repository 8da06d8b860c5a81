"""Slots in a buffer that has a trailer behind each rank's slice: every element of every slot is once in its rank's slice, and in order."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero3.core import gradient_buffer
from zero3.core import layout as core_layout
from zero3.core.gradient_buffer import GradientBuffer
from zero3.core.layout import ChunkLayout, GradientLayout, side_by_side

numbers = st.sets(st.integers(0, 5))
shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=6)


@st.composite
def layouts(draw: st.DrawFn) -> ChunkLayout:
    named = [(str(number), shape) for number, shape in enumerate(draw(shapes))]
    world_size = draw(st.integers(1, 5))
    equal = ChunkLayout.build(named, world_size)
    if draw(st.booleans()):
        return equal
    cuts = sorted(draw(st.lists(st.integers(0, equal.numel), min_size=world_size - 1, max_size=world_size - 1)))
    return ChunkLayout(side_by_side(named), world_size, (0, *cuts, equal.numel))


@given(
    layout=layouts(), trailer=st.integers(0, 7), came=numbers | st.just(set(range(6))), second=numbers | st.just(set()),
    few=st.sampled_from([0, 5, 128]), small=st.sampled_from([0, 6, 2**22]),
)  # fmt: skip
def test_a_gradient_buffer_has_each_slice_and_behind_it_which_slots_came(
    layout: ChunkLayout, trailer: int, came: set[int], second: set[int], few: int, small: int
) -> None:
    """As many elements behind a slice as `trailer`, whether there are so many slots or not; a second gradient is added. Gradients are
    copied together if they are `few`, each if it is `small`.
    """
    with patch.object(core_layout, "FEW", few), patch.object(core_layout, "SMALL", small), patch.object(gradient_buffer, "SMALL", small):
        has_each_slice(layout, trailer, came, second)


def has_each_slice(layout: ChunkLayout, trailer: int, came: set[int], second: set[int]) -> None:
    buffer = GradientBuffer(GradientLayout(layout, trailer), torch.float64, torch.device("cpu"), torch.ones(trailer, dtype=torch.float64))
    expected = torch.zeros(layout.padded_numel, dtype=torch.float64)
    reached = {number for number in came if number < len(layout.slots)}
    for times, numbers in ((1.0, sorted(reached)), (2.0, sorted(reached & second))):
        for number in numbers:
            slot = layout.slots[number]
            gradient = times * torch.arange(1.0, 1 + slot.numel, dtype=torch.float64) + 100 * number
            shaped = gradient.view(slot.shape)
            buffer.add(number, shaped.mT.contiguous().mT if len(slot.shape) > 1 and number % 2 else shaped)
            expected[slot.offset : slot.stop] += gradient
    full = buffer.complete()
    assert len(buffer.held) == 1 and buffer.held[0] is full, "autograd's gradients are kept beside the buffer"
    assert full.numel() == layout.padded_numel + layout.world_size * trailer
    bounds = buffer.layout.bounds
    for rank in range(layout.world_size):
        low, high = layout.chunk_range(rank)
        start = low + rank * trailer
        assert bounds is None or bounds[rank : rank + 2] == (start, high + (rank + 1) * trailer)
        assert torch.equal(full[start : start + high - low], expected[low:high])
        told = full[start + high - low : start + high - low + trailer].bool().tolist()
        wanted = [number in reached for number in range(trailer)]
        assert told[: len(layout.slots)] == wanted[: len(layout.slots)]


@given(layout=layouts(), came=st.sets(st.integers(0, 5)))
def test_pieces_of_gradients_are_the_slices_of_the_buffer(layout: ChunkLayout, came: set[int]) -> None:
    trailer = len(layout.slots)
    one, other = (
        GradientBuffer(GradientLayout(layout, trailer), torch.float64, torch.device("cpu"), torch.ones(trailer, dtype=torch.float64))
        for _ in range(2)
    )
    for number in sorted(came):
        if number < trailer:
            slot = layout.slots[number]
            for buffer in (one, other):
                buffer.add(number, torch.full(slot.shape, 1.0 + number, dtype=torch.float64))
    pieces = one.pieces()
    assert pieces is not None
    assert torch.equal(torch.cat([piece for each in pieces for piece in each]), other.complete())


@pytest.mark.parametrize(
    ("slots", "last", "home", "name"),
    [(3, 8, torch, "cat"), (3, 5, gradient_buffer, "copy_together"), (2, 8, gradient_buffer, "copy_together")],
)
def test_small_gradients_and_all_trailers_are_one_copy(slots: int, last: int, home: object, name: str) -> None:
    """Also those that lie in several slices, where there is padding, and where one is missing. What raises there is lost by nobody."""
    layout = ChunkLayout.build([("large", (40, 3)), ("b", (16,)), ("c", (last,))], 4)
    buffer = GradientBuffer(GradientLayout(layout, 3), torch.float32, torch.device("cpu"), torch.ones(3))
    for number, slot in enumerate(layout.slots[:slots]):
        buffer.add(number, torch.randn(slot.shape))
    with patch.object(home, name, side_effect=MemoryError), pytest.raises(MemoryError):
        buffer.complete()
    assert len(buffer.came) == slots and not buffer.written
    with patch.object(home, name, wraps=getattr(home, name)) as copies:
        full = buffer.complete()
    assert copies.call_count == 1 and buffer.written == set(range(slots))
    assert all(torch.equal(rank[-3:], (torch.arange(3) < slots).float()) for rank in full.view(4, -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("slots", [2, 3])
def test_what_is_copied_together_has_one_dtype(slots: int, dtype: torch.dtype) -> None:
    """Trailers too, where gradients come in another dtype than the buffer's: else each would be a kernel of its own."""
    layout = ChunkLayout.build([("a", (40, 3)), ("b", (16,)), ("c", (5,))], 4)
    buffer = GradientBuffer(GradientLayout(layout, 3), torch.float32, torch.device("cpu"), torch.ones(3))
    expected = torch.zeros(layout.padded_numel)
    for number, slot in enumerate(layout.slots[:slots]):
        gradient = torch.randn(slot.shape).to(dtype)
        expected[slot.offset : slot.stop] = gradient.flatten()
        buffer.add(number, gradient)
    with patch.object(gradient_buffer, "copy_together", wraps=torch._foreach_copy_) as copies:
        full = buffer.complete().view(4, -1)
    assert [{each.dtype for each in call.args[1]} for call in copies.call_args_list] == [{dtype}]
    assert full.dtype == torch.float32 and torch.equal(full[:, :-3].flatten(), expected)
    assert torch.equal(full[:, -3:], (torch.arange(3) < slots).float().expand(4, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("around", [torch.float16, torch.bfloat16])
def test_autocast_around_a_backward_changes_no_buffer(around: torch.dtype, dtype: torch.dtype) -> None:
    """It has rules for `torch.cat`, which don't allow each dtype."""
    layout = GradientLayout(ChunkLayout.build([("a", (4, 4)), ("b", (3,))], 2), 2)
    buffers = [GradientBuffer(layout, dtype, torch.device("cpu"), torch.ones(2, dtype=dtype)) for _ in range(2)]
    for number, slot in enumerate(layout.of.slots):
        gradient = torch.randn(slot.shape).to(dtype)
        for buffer in buffers:
            buffer.add(number, gradient)
    with torch.autocast("cpu", dtype=around):
        found = buffers[0].complete()
    assert found.dtype == dtype and torch.equal(found, buffers[1].complete())
