"""The transfers that replace gloo's own: the same numbers, for every dtype and length, among any ranks."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.dtypes import MOVED, bytes_of, values
from tests.support.processes import Rank, on_ranks
from zero3 import Zero3Layer
from zero3.comm.communicator import SoloCommunicator
from zero3.comm.factory import communicator_for
from zero3.comm.gloo import GlooCommunicator
from zero3.comm.process_group import GroupCommunicator
from zero3.comm.shared_memory import neighbours

CPU = torch.device("cpu")
LENGTHS = [1, 7, 1001, 65537]  # of a chunk: odd, across the sizes at which gloo and kernels change their ways
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
OTHERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.float8_e4m3fn]

torch_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
torch_reduce_scatter: Callable[..., object] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


ways = pytest.mark.parametrize("way", ["memory", "sockets"])
all_ways = pytest.mark.parametrize("way", ["memory", "sockets", "two hosts"])


def by(rank: Rank, way: str, body: Callable[..., Any], *arguments: Any) -> Any:
    """`body(rank, *arguments)`, whose transfers go that way. "two hosts": of two ranks each; what is left over is on a third."""
    host = rank.number // 2 if way == "two hosts" else 0
    with (
        mock.patch.dict(os.environ, {"ZERO3_HOST_MEMORY": "0" if way == "sockets" else "1"}),
        mock.patch.object(neighbours, "_network", return_value=host),
    ):
        return body(rank, *arguments)


def communicator() -> GlooCommunicator:
    found = communicator_for(None, CPU)
    assert isinstance(found, GlooCommunicator)
    return found


def numbers(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Values `[length]` of one rank, over many magnitudes, so that every rounding shows."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(length, generator=generator, dtype=torch.float64) * 10 ** torch.randint(-3, 4, (length,), generator=generator)
    return values.to(dtype)


def reduced_both_ways(rank: Rank, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    full = numbers(rank.number, length * rank.world_size, dtype)
    ours, again, theirs = (torch.empty(length, dtype=dtype) for _ in range(3))
    communicator().reduce_scatter(ours, full.clone()).wait()
    communicator().reduce_scatter(again, full.clone()).wait()
    torch_reduce_scatter(theirs, full.clone())
    return ours, again, theirs


@ways
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_reduce_scatter_gives_torchs_bits_on_two_ranks(length: int, dtype: torch.dtype, way: str) -> None:
    for ours, _, theirs in on_ranks(2, by, way, reduced_both_ways, length, dtype):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@all_ways
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("world_size", [3, 4])
def test_reduce_scatter_on_more_ranks_rounds_as_a_sum_in_rank_order(world_size: int, dtype: torch.dtype, way: str) -> None:
    length = 1001
    fulls = [numbers(rank, length * world_size, dtype).view(world_size, length) for rank in range(world_size)]
    for rank, (ours, again, theirs) in enumerate(on_ranks(world_size, by, way, reduced_both_ways, length, dtype)):
        expected = fulls[0][rank].clone()
        for full in fulls[1:]:
            expected += full[rank]
        assert torch.equal(ours, expected)  # so it is the same in every run, however late a rank is
        assert torch.equal(ours, again)
        # each of the additions rounds once, at the size of what was summed
        scale = sum(full[rank].double().abs() for full in fulls)
        assert ((ours.double() - theirs.double()).abs() <= world_size * torch.finfo(dtype).eps * scale).all()


def values_moved(rank: Rank, by_torch: bool) -> list[str]:
    """The dtypes whose bytes did not come as they were sent, in any collective that only moves them."""
    warnings.filterwarnings("ignore", "B?Complex(Half|32) support is experimental")
    ours: Any = GroupCommunicator(dist.group.WORLD, "gloo", CPU) if by_torch else communicator()
    bounds, changed = (0, 0, 5, 7), []
    for dtype in MOVED:
        sent = [values(number, dtype, 7) for number in range(rank.world_size)]
        mine = sent[rank.number]

        def check(what: str, found: Tensor, expected: Tensor, dtype: torch.dtype = dtype) -> None:
            if bytes_of(found) != bytes_of(expected):
                changed.append(f"{what} of {dtype}")

        for shape in [(), (7,), (1, 7)]:
            found = mine[0].clone() if shape == () else mine.clone().view(shape)
            ours.broadcast(found, 1)
            check("broadcast", found, sent[1][0] if shape == () else sent[1])
        full = torch.empty(21, dtype=dtype)
        ours.all_gather(full, mine).wait()
        check("all_gather", full, torch.cat(sent))
        own = slice(bounds[rank.number], bounds[rank.number + 1])
        if not by_torch:  # gloo's own takes equal slices only
            ours.all_gather(full[:7], mine[own], bounds).wait()
            expected = [each[a:b] for each, (a, b) in zip(sent, itertools.pairwise(bounds), strict=True)]
            check("uneven all_gather", full[:7], torch.cat(expected))
        for cuts in (None, bounds):
            at = own if cuts else slice(2 * rank.number, 2 * rank.number + 2)
            first = [sent[0][a:b] for a, b in itertools.pairwise(bounds)] if cuts else list(sent[0][:6].split(2))
            found = torch.empty(at.stop - at.start, dtype=dtype)
            ours.scatter(found, first if rank.number == 0 else None, cuts).wait()
            check("scatter", found, sent[0][at])
    return changed


@ways
@pytest.mark.parametrize("by_torch", [False, True])
def test_collectives_move_the_bytes_of_every_dtype(way: str, by_torch: bool) -> None:
    assert on_ranks(3, by, way, values_moved, by_torch) == [[], [], []]


def gathered(rank: Rank, length: int, dtype: torch.dtype) -> bytes:
    everything = torch.Generator().manual_seed(7)
    top, shape = 2 if dtype == torch.bool else 256, (rank.world_size, length * dtype.itemsize)
    raw = torch.randint(0, top, shape, generator=everything, dtype=torch.uint8)
    full = torch.zeros(length * rank.world_size, dtype=dtype)
    communicator().all_gather(full, raw[rank.number].view(dtype)).wait()
    assert torch.equal(full.view(torch.uint8), raw.flatten()), "bytes must arrive as they are, NaNs and all"
    return bytes(full.view(torch.uint8).tolist())


@all_ways
@pytest.mark.parametrize("dtype", FLOATS + OTHERS, ids=str)
def test_all_gather_moves_any_dtypes_bytes_untouched(dtype: torch.dtype, way: str) -> None:
    first, *others = on_ranks(3, by, way, gathered, 257, dtype)
    assert all(other == first for other in others)


def empty_transfers(rank: Rank) -> tuple[int, int]:
    gathered, reduced = torch.empty(0), torch.empty(0)
    communicator().all_gather(gathered, torch.empty(0)).wait()
    communicator().reduce_scatter(reduced, torch.empty(0)).wait()
    return gathered.numel(), reduced.numel()


@ways
@pytest.mark.parametrize("world_size", [2, 3])
def test_empty_chunks_travel(world_size: int, way: str) -> None:
    assert on_ranks(world_size, by, way, empty_transfers) == [(0, 0)] * world_size


def many_in_flight(rank: Rank) -> bool:
    """Gathers and reductions of different lengths begun together, waited for in the opposite order."""
    mine, world = communicator(), rank.world_size
    lengths = [5, 4096, 1, 70001, 33, 2000]
    shards = [numbers(rank.number + 100 * i, n, torch.float32) for i, n in enumerate(lengths)]
    fulls = [numbers(rank.number + 100 * i, n * world, torch.float32) for i, n in enumerate(lengths)]
    gathered, reduced = [torch.empty(n * world) for n in lengths], [torch.empty(n) for n in lengths]
    pending = []
    for i in range(len(lengths)):
        pending += [mine.all_gather(gathered[i], shards[i]), mine.reduce_scatter(reduced[i], fulls[i].clone())]
    for each in reversed(pending):
        each.wait()
    for i, n in enumerate(lengths):
        assert torch.equal(gathered[i], torch.cat([numbers(r + 100 * i, n, torch.float32) for r in range(world)]))
        total = sum(numbers(r + 100 * i, n * world, torch.float32)[rank.number * n : (rank.number + 1) * n] for r in range(world))
        assert torch.equal(reduced[i], total)
    return True


@all_ways
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_transfers_in_flight_together_do_not_mix(world_size: int, way: str) -> None:
    assert all(on_ranks(world_size, by, way, many_in_flight))


def dealt_out(rank: Rank, lengths: tuple[int, ...]) -> bool:
    """Rank 0's slices of those lengths, twenty times over."""
    mine, bounds = communicator(), (0, *itertools.accumulate(lengths))
    for turn in range(20):
        everything = numbers(turn, bounds[-1], torch.float32)
        slices = [everything[start:stop] for start, stop in itertools.pairwise(bounds)]
        shard = torch.empty(lengths[rank.number])
        equal = None if len(set(lengths)) == 1 else bounds
        mine.scatter(shard, [each.clone() for each in slices] if rank.number == 0 else None, equal).wait()
        assert torch.equal(shard, slices[rank.number])
    return True


@all_ways
@pytest.mark.parametrize("lengths", [(1001, 1001, 1001), (5, 0, 70001)], ids=["equal", "unequal"])
def test_rank_0_deals_out_its_slices(lengths: tuple[int, ...], way: str) -> None:
    assert all(on_ranks(3, by, way, dealt_out, lengths))


def swapped(rank: Rank, lengths: tuple[int, ...]) -> bool:
    """Every rank sends slices of those lengths to the others, three times over, with all under way at once."""
    mine, bounds = communicator(), (0, *itertools.accumulate(lengths))
    equal = None if len(set(lengths)) == 1 else bounds
    sent = [[numbers(10 * turn + each, bounds[-1], torch.uint8) for each in range(rank.world_size)] for turn in range(3)]
    received = [torch.empty(rank.world_size * lengths[rank.number], dtype=torch.uint8) for _ in range(3)]
    pending = [mine.all_to_all(place, all_of[rank.number].clone(), equal) for place, all_of in zip(received, sent, strict=True)]
    own = slice(bounds[rank.number], bounds[rank.number + 1])
    for each, place, all_of in zip(pending, received, sent, strict=True):
        each.wait()
        assert torch.equal(place, torch.cat([other[own] for other in all_of]))
    return True


@all_ways
@pytest.mark.parametrize("lengths", [(1001, 1001, 1001), (5, 0, 70001), (0, 0, 0)], ids=["equal", "unequal", "empty"])
def test_every_rank_sends_every_other_one_a_slice(lengths: tuple[int, ...], way: str) -> None:
    assert all(on_ranks(3, by, way, swapped, lengths))


class Conjugated(nn.Module):
    """Autograd hands over its weight's gradient as a view whose bytes are not its values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.complex(*torch.arange(16.0).view(2, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.conj() * x).real.sum()


def conjugated_gradients(rank: Rank) -> tuple[Tensor, Tensor]:
    x = torch.complex(torch.ones(8), torch.arange(8.0))
    model, plain = Zero3Layer(Conjugated()), Conjugated()
    model(x).backward()
    plain(x).backward()
    assert plain.weight.grad is not None
    mine = model.get_trainable_chunk()[0].grad
    return mine.as_subclass(Tensor), plain.weight.grad.resolve_conj()[4 * rank.number : 4 * rank.number + 4]


@ways
def test_a_gradient_that_is_conjugated_later(way: str) -> None:
    for mine, expected in on_ranks(2, by, way, conjugated_gradients):
        assert torch.equal(mine, expected)


def compare_groups(rank: Rank) -> list[bool]:
    alone = [dist.new_group([number]) for number in range(2)][rank.number]
    first, second, other = (GroupCommunicator(group, "nccl", CPU) for group in (dist.group.WORLD, dist.group.WORLD, alone))
    return [first.same_ranks(second), first.same_ranks(other), first.same_ranks(SoloCommunicator())]


def test_communicators_of_one_group_have_the_same_ranks() -> None:
    assert on_ranks(2, compare_groups) == [[True, False, False]] * 2


def test_every_layer_and_kind_of_transfer_has_a_tag_of_its_own() -> None:
    communicator, tags = object.__new__(GlooCommunicator), []
    for communicator.channel in range(30):
        tags += [communicator._tag(kind) for kind in range(3)]
    assert len(set(tags)) == len(tags)


def gathered_in_part(rank: Rank) -> list[float]:
    part = dist.new_group([2, 1])
    if rank.number == 0:
        return []
    with mock.patch.dict(os.environ, {"ZERO3_HOST_MEMORY": "0"}):
        mine, full = communicator_for(part, torch.device("cpu")), torch.zeros(2)
        mine.all_gather(full, torch.tensor([float(rank.number)])).wait()
        summed = torch.empty(1)
        mine.reduce_scatter(summed, full).wait()
    return [*full.tolist(), summed.item()]


def test_a_group_of_some_ranks_travels_through_sockets_among_them_alone() -> None:
    none, first, second = on_ranks(3, gathered_in_part, fresh=True)
    assert none == [] and sorted(first[:2]) == [1.0, 2.0] and first[:2] == second[:2]
    assert sorted([first[2], second[2]]) == [2.0, 4.0]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, or the simulated one")
def test_collectives_over_nccl(tmp_path: Path) -> None:
    """Of one rank, where layers make none: what they call is there, and takes and gives what it should."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, device_id=device)
    try:
        _each_collective(device)
    finally:
        dist.destroy_process_group()


def _each_collective(device: torch.device) -> None:
    group = GroupCommunicator(dist.group.WORLD, "nccl", device)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        values = torch.arange(1, 9, device=device).to(dtype)
        gathered, swapped = torch.zeros_like(values), torch.zeros_like(values)
        group.all_gather(gathered, values).wait()
        group.all_to_all(swapped, values).wait()
        assert torch.equal(gathered, values) and torch.equal(swapped, values)
    values = torch.arange(1.0, 9.0, device=device)
    reduced, summed = torch.zeros_like(values), values.clone()
    group.reduce_scatter(reduced, values).wait()
    group.all_reduce(summed)
    assert torch.equal(reduced, values) and torch.equal(summed, values)
    assert group.exchange(b"what ranks compare", device) == [b"what ranks compare"]
