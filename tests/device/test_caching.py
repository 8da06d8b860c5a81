"""The allocator's model, by torch's rules on sequences whose outcome is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.device.caching import MIB, CachingAllocator

pytestmark = pytest.mark.no_device


def asked(*sizes: float, expandable: bool = False) -> CachingAllocator:
    memory = CachingAllocator(expandable=expandable)
    for key, size in enumerate(sizes):
        memory.allocate(key, size, 0, 0.0)
    return memory


def done(stream: int) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([513], 1024, 2 * MIB),
        ([MIB], MIB, 2 * MIB),  # the largest that is small
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
        ([10 * MIB - 512, 10 * MIB - 512], 20 * MIB, 20 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),  # from here on to measure
        ([11 * MIB + 1], 12 * MIB, 12 * MIB),  # what is left over is not worth a block: it is the tensor's
    ],
)
def test_segments(sizes: list[float], allocated: int, reserved: int) -> None:
    memory = asked(*sizes)
    assert memory.reserved == reserved
    assert memory.allocated == allocated


def test_what_is_not_split_off_is_allocated_and_was_not_requested() -> None:
    memory = asked(11 * MIB + 1, 1)
    assert (memory.allocated, memory.requested) == (12 * MIB + 512, 11 * MIB + 2)
    memory.free(0, done)
    assert (memory.allocated, memory.requested, memory.peak_requested) == (512, 1, 11 * MIB + 2)


def test_a_rest_of_more_than_a_mebibyte_is_split_off() -> None:
    memory = asked(16 * MIB)
    memory.free(0, done)
    memory.allocate(1, 12 * MIB, 0, 0.0)
    assert (memory.allocated, memory.reserved) == (12 * MIB, 16 * MIB)
    memory.allocate(2, 4 * MIB, 0, 0.0)
    assert (memory.allocated, memory.reserved) == (16 * MIB, 16 * MIB)


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    memory = asked(40 * MIB, 20 * MIB, 30 * MIB)
    for key in range(3):
        memory.free(key, done)
    memory.allocate(3, 18 * MIB, 0, 0.0)
    memory.allocate(4, 40 * MIB, 0, 0.0)
    memory.allocate(5, 30 * MIB, 0, 0.0)
    assert memory.reserved == 90 * MIB


def test_neighbours_are_joined() -> None:
    memory = asked(32 * MIB)
    memory.free(0, done)
    for key in (1, 2, 3, 4):
        memory.allocate(key, 8 * MIB, 0, 0.0)
    for key in (2, 4, 3, 1):
        memory.free(key, done)
    memory.allocate(5, 32 * MIB, 0, 0.0)
    assert memory.reserved == 32 * MIB


def test_segments_are_not_joined() -> None:
    memory = asked(16 * MIB, 16 * MIB)
    memory.free(0, done)
    memory.free(1, done)
    memory.allocate(2, 32 * MIB, 0, 0.0)
    assert memory.reserved == 64 * MIB


def test_an_expandable_segment_grows_at_its_end() -> None:
    memory = asked(16 * MIB, 16 * MIB, expandable=True)
    assert memory.reserved == 40 * MIB  # in steps of 20 MiB
    memory.free(0, done)
    memory.free(1, done)
    memory.allocate(2, 50 * MIB, 0, 0.0)
    assert (memory.allocated, memory.reserved) == (50 * MIB, 60 * MIB)


def test_memory_belongs_to_its_stream() -> None:
    memory = asked(16 * MIB)
    memory.free(0, done)
    memory.allocate(1, 16 * MIB, 1, 0.0)
    assert memory.reserved == 32 * MIB


def test_what_another_stream_uses_is_active_until_it_is_done() -> None:
    memory = asked(16 * MIB)
    memory.use(0, 1)
    memory.free(0, lambda stream: 5.0)
    assert (memory.allocated, memory.active) == (0, 16 * MIB)
    memory.allocate(1, 16 * MIB, 0, 4.0)
    assert (memory.reserved, memory.peak_active) == (32 * MIB, 32 * MIB)
    memory.allocate(2, 16 * MIB, 0, 5.0)
    assert memory.reserved == 32 * MIB


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60 * MIB), st.integers(0, 1)), max_size=80), st.booleans())
def test_nothing_is_lost(actions: list[tuple[int, int, int]], expandable: bool) -> None:
    """A key that is there is given back, another one gets memory. In the end each segment is one free block."""
    memory, there = CachingAllocator(expandable=expandable), set[int]()
    for key, size, stream in actions:
        if key in there:
            memory.free(key, done)
            there.remove(key)
        else:
            memory.allocate(key, size, stream, 0.0)
            there.add(key)
        assert memory.requested <= memory.allocated <= memory.reserved
    for key in there:
        memory.free(key, done)
    assert memory.allocated == memory.active == memory.requested == 0
    free = [block for blocks in memory._free.values() for _, _, block in blocks]
    assert sum(block.size for block in free) == memory.reserved
    assert len(free) == (len(memory._last) if expandable else memory.segments)
