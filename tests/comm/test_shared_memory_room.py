"""Memory between the processes of one host: how much of it is taken, and that nothing is left behind."""

from __future__ import annotations

import gc
import mmap
import os
import random
import struct
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero3
from tests.comm.test_collectives import communicator
from tests.comm.test_shared_memory import gather, memory, open_files, served
from tests.support.processes import Outcome, Rank, on_ranks, try_on_ranks
from zero3 import Zero3Layer, Zero3Sequential
from zero3.comm.gloo import GlooCommunicator
from zero3.comm.shared_memory import host_memory, neighbours
from zero3.zero1.division import LARGE_BYTES

pytestmark = served


def places_after_steps(rank: Rank) -> tuple[int, int, int]:
    """Of a model of five layers: places in use after 2 and after 40 steps, and how many transfers a step made."""
    model = Zero3Sequential([Zero3Layer(nn.Linear(64, 64)) for _ in range(5)])
    optimizer = torch.optim.SGD(model.get_trainable_chunk())
    found, numbers = [], []
    for step in range(40):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 38, 39):
            found.append(memory().places)
            numbers.append(memory()._last)
    return found[0], found[-1], numbers[-1] - numbers[-2]


def test_places_are_used_again() -> None:
    for early, late, transfers in on_ranks(2, places_after_steps):
        assert transfers == 5 + 4 + 5  # gathers in forward and in backward, reductions
        assert early <= late <= 6


def gives_up(rank: Rank) -> tuple[int, Tensor]:
    """Rank 1 begins transfers that it never waits for, some before rank 0 takes part, some after."""
    gather(rank)
    for turn in range(100):
        if rank.number == turn % 2:
            dist.barrier()
        pending = communicator().all_gather(torch.empty(2000), torch.zeros(1000))
        if rank.number != turn % 2:
            dist.barrier()
        if rank.number == 0:
            pending.wait()
        del pending
        dist.barrier()
        found = gather(rank)
    return memory().places, found


def test_a_transfer_that_is_given_up_keeps_no_place() -> None:
    for places, found in on_ranks(2, gives_up):
        assert places <= 4
        assert torch.equal(found, torch.cat([torch.zeros(1000), torch.ones(1000)]))


def many_under_way(rank: Rank, count: int) -> tuple[int, int]:
    """No rank waits for any before it has begun them all. How many descriptors that takes."""
    gather(rank)
    dist.barrier()
    before = len(open_files())
    under_way = []
    for number in range(count):
        full = torch.empty(2)
        under_way.append((full, communicator().all_gather(full, torch.full((1,), float(number + rank.number)))))
    dist.barrier()
    for number, (full, pending) in enumerate(under_way):
        pending.wait()
        assert full.tolist() == [number, number + 1.0]
    return memory().places, len(open_files()) - before


def test_as_many_may_be_under_way_as_anybody_begins() -> None:
    assert on_ranks(2, many_under_way, 200, group_timeout=5.0) == [(200, 0)] * 2


def too_many_under_way(rank: Rank) -> Tensor:
    gather(rank)
    with (
        mock.patch.object(host_memory, "_PLACES", 3),
        pytest.raises(RuntimeError, match=r"3 transfers are under way.*wait for earlier ones"),
    ):
        many_under_way(rank, 4)
    dist.barrier()
    return gather(rank)  # those that were given up have given back their places


def test_more_than_can_be_under_way_is_an_error_and_no_waiting() -> None:
    for full in on_ranks(2, too_many_under_way, group_timeout=5.0):
        assert torch.equal(full, torch.cat([torch.zeros(1000), torch.ones(1000)]))


def of_all_sizes(rank: Rank) -> tuple[int, int]:
    """One large and four small transfers at a time, in any order. Most bytes under way, and what the file takes for it."""
    dice = random.Random(0)
    lengths = [1_000_000, 250, 250, 250, 250]
    for _ in range(40):
        dice.shuffle(lengths)
        under_way = [communicator().all_gather(torch.empty(2 * length), torch.ones(length)) for length in lengths]
        for pending in under_way:
            pending.wait()
    blocks = os.fstat(memory()._file_fd).st_blocks * 512
    assert blocks - 100_000 < memory().nbytes <= blocks
    return 4 * sum(lengths), memory().nbytes


def test_the_file_takes_little_more_than_what_is_under_way() -> None:
    for under_way, taken in on_ranks(2, of_all_sizes):
        assert taken < 3 * under_way  # a rank that is ahead puts down the next before the other has read all


def many_parameters(rank: Rank) -> tuple[int, int]:
    """ZeroRedundancyOptimizer sends each in a transfer of its own. What the file takes for them, and what there is to send."""
    parameters = [nn.Parameter(torch.ones(LARGE_BYTES // 4)) for _ in range(80)]
    optimizer = zero3.ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with mock.patch.object(GlooCommunicator, "trim"):  # so that the file keeps its largest size
        optimizer.step()
    assert all(bool((parameter == 0.9).all()) for parameter in parameters)
    return memory().nbytes, 80 * LARGE_BYTES // rank.world_size


def test_zeroredundancyoptimizer_does_not_have_all_parameters_under_way_at_once() -> None:
    for taken, sent in on_ranks(2, many_parameters, fresh=True, group_timeout=5.0):
        assert taken < sent / 3  # one rank may be UNDER_WAY transfers ahead of the other's


def has_no_memory(rank: Rank) -> Tensor:
    """What is asked for and not to be had is an error, and then all goes on."""
    gather(rank)
    with (
        mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "No space left on device")),
        pytest.raises(RuntimeError, match=r"no memory for 400000 bytes for other ranks, beside 4032: No space left"),
    ):
        gather(rank, 100_000)
    dist.barrier()
    return gather(rank, 100_000)


def test_memory_that_is_not_to_be_had() -> None:
    for full in on_ranks(2, has_no_memory, fresh=True):
        assert torch.equal(full, torch.cat([torch.zeros(100_000), torch.ones(100_000)]))


def is_interrupted(rank: Rank) -> list[float]:
    """Rank 1, while it puts down a tensor; then it begins anew."""
    gather(rank)
    if rank.number == 1:
        with mock.patch.object(torch, "cat", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            gather(rank)
    return [float(gather(rank)[-1]) + turn for turn in range(3)]


def test_a_transfer_that_was_interrupted_at_its_beginning_can_be_begun_anew() -> None:
    assert on_ranks(2, is_interrupted, group_timeout=5.0) == [[1.0, 2.0, 3.0]] * 2


def forgets(rank: Rank) -> tuple[bool, bool, str]:
    """Also while there still is a model; it says so when it is used."""
    gather(rank)
    mine = communicator()
    pending = mine.all_gather(torch.empty(2), torch.ones(1))
    during = any("memfd:zero3" in name for name in open_files())
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    with pytest.raises(RuntimeError, match="was destroyed while a transfer was under way"):
        pending.wait()
    with pytest.raises(RuntimeError) as error:
        mine.all_gather(torch.empty(2), torch.ones(1))
    return during, any("memfd:zero3" in name for name in open_files()), str(error.value)


def test_a_group_that_is_destroyed_takes_its_memory_along() -> None:
    message = "this model's process group was destroyed: train before that, or shard the model anew"
    assert on_ranks(2, forgets, fresh=True) == [(True, False, message)] * 2


def forked_child(rank: Rank) -> Tensor:
    """A child that ends by itself, as a data loader's worker does, says nothing in its parent's name."""
    gather(rank)
    if not (child := os.fork()):
        memory().close()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    return gather(rank)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_closes_nothing() -> None:
    outcomes: list[Outcome] = try_on_ranks(2, forked_child, fresh=True)
    assert [outcome.error for outcome in outcomes] == ["", ""]


def test_the_introduction_has_one_length_on_all_machines() -> None:
    assert neighbours._INTRODUCTION.size == struct.calcsize("<?36sQqq16s") == 77


def test_the_header_has_room_for_every_place() -> None:
    for world_size in range(1, 40):
        outbox = host_memory._Outbox(mmap.mmap(-1, host_memory._header_bytes(world_size)), world_size)
        last = outbox.receipt(host_memory._PLACES - 1, world_size - 1)
        assert last < len(outbox.header), world_size
