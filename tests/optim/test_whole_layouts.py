"""Chunks whose cuts lie where parameters end: their layouts, and their transfers between processes."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.support.processes import Rank, on_ranks
from zero3.comm.factory import communicator_for
from zero3.comm.process_group import GroupCommunicator
from zero3.core.layout import ChunkLayout, Slot
from zero3.optim.cuts import deal, dealt

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=8)


@given(shapes, st.integers(1, 6), st.data())
def test_a_dealt_slot_lies_whole_in_its_owners_chunk(found: list[tuple[int, ...]], world_size: int, data: st.DataObject) -> None:
    owners = data.draw(st.lists(st.integers(0, world_size - 1), min_size=len(found), max_size=len(found)))
    layout = dealt([(f"p{i}", shape) for i, shape in enumerate(found)], owners, world_size)
    assert sorted(slot.name for slot in layout.slots) == sorted(f"p{i}" for i in range(len(found)))
    assert layout.padded_numel == layout.numel == sum(torch.Size(shape).numel() for shape in found)
    assert sum(layout.chunk_numel(rank) for rank in range(world_size)) == layout.numel
    for rank in range(world_size):
        for piece in layout.pieces(rank):
            assert owners[int(piece.slot.name[1:])] == rank
            assert (piece.start, piece.stop) == (0, piece.slot.numel)


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(1, 8))
def test_owners_hold_about_as_much(sizes: list[int], world_size: int) -> None:
    owners = deal(sizes, world_size)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(world_size)]
    assert sum(loads) == sum(sizes)
    assert max(loads) <= min(loads) + max(sizes, default=0), "the last that the fullest rank took went to the emptiest"


@pytest.mark.parametrize("bounds", [(0, 3), (0, 2, 4), (1, 2, 3), (0, 4, 3), (0, 3, 2)])
def test_bounds_must_fit(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="bounds must rise from 0 to 3 in 2 steps"):
        ChunkLayout((Slot("a", (3,), 0),), 2, bounds)


# -- transfers

CUTS = {2: [(0, 3, 10), (0, 0, 7), (0, 5, 5), (0, 0, 0)], 3: [(0, 1, 1, 6), (0, 0, 0, 4), (0, 2, 5, 9), (0, 4, 4, 4)]}


def all_transfers(rank: Rank) -> None:
    for bounds in CUTS[rank.world_size]:
        for dtype in (torch.float32, torch.bfloat16):
            transfers(rank, bounds, dtype, False)
        transfers(rank, bounds, torch.float64, True)


def transfers(rank: Rank, bounds: tuple[int, ...], dtype: torch.dtype, plain: bool) -> None:
    mine = GroupCommunicator(dist.group.WORLD, "gloo", torch.device("cpu")) if plain else communicator_for(None, torch.device("cpu"))
    place = slice(bounds[rank.number], bounds[rank.number + 1])
    fulls = [torch.arange(bounds[-1]).add(100 * r).to(dtype) for r in range(rank.world_size)]
    if not plain:
        gathered, shard = torch.zeros(bounds[-1], dtype=dtype), fulls[0][place].clone()
        mine.all_gather(gathered, shard, bounds).wait()
        assert torch.equal(gathered, fulls[0])
        in_place = torch.full_like(gathered, 77)
        in_place[place] = shard
        mine.all_gather(in_place, in_place[place], bounds).wait()
        assert torch.equal(in_place, fulls[0])
        reduced = torch.zeros_like(shard)
        mine.reduce_scatter(reduced, fulls[rank.number].clone(), bounds).wait()
        assert torch.equal(reduced, sum(fulls)[place])
    scattered = torch.zeros_like(fulls[0][place])
    slices = [fulls[0][start:stop] for start, stop in pairwise(bounds)] if rank.number == 0 else None
    mine.scatter(scattered, slices, bounds).wait()
    assert torch.equal(scattered, fulls[0][place])


@pytest.mark.parametrize("world_size", CUTS)
def test_unequal_slices_travel(world_size: int) -> None:
    on_ranks(world_size, all_transfers)


def over_lists(rank: Rank) -> list[tuple[bool, bool]]:
    """What backends other than gloo do, on torch's process group of threads."""
    from torch.testing._internal.distributed import multi_threaded_pg

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    store, bounds, results = dist.HashStore(), CUTS[3][0], {}

    def one(number: int) -> None:
        dist.init_process_group("threaded", rank=number, world_size=3, store=store)
        mine, place = GroupCommunicator(dist.group.WORLD, "threaded", torch.device("cpu")), slice(bounds[number], bounds[number + 1])
        fulls = [torch.arange(bounds[-1]).add(100.0 * r) for r in range(3)]
        gathered, reduced = torch.zeros(bounds[-1]), torch.zeros_like(fulls[0][place])
        mine.all_gather(gathered, fulls[0][place].clone(), bounds).wait()
        mine.reduce_scatter(reduced, fulls[number].clone(), bounds).wait()
        results[number] = torch.equal(gathered, fulls[0]), torch.equal(reduced, sum(fulls)[place])

    threads = [threading.Thread(target=one, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return [results[number] for number in range(3)]


def test_other_backends_take_lists_of_slices() -> None:
    assert on_ranks(1, over_lists, fresh=True, process_group=False) == [[(True, True)] * 3]
