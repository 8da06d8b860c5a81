"""ZeroRedundancyOptimizer between processes of one host: the shared memory of its exchanges stays small, and is given back."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zero3
from tests.support.processes import Rank, on_ranks
from zero3.comm.factory import communicator_for, give_memory_back
from zero3.comm.gloo import GlooCommunicator
from zero3.comm.shared_memory.host_memory import HostMemory
from zero3.zero1.gathers import PIECES_BYTES

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "pidfd_open"), reason="shared memory needs Linux on x86-64"
)
MEGABYTE = 2**20
HEADERS = 2**16  # bytes, of the pages in use
WIDTH, DEPTH = 1024, 6  # of linear layers: 24 MB of weights


def communicator() -> GlooCommunicator:
    found = communicator_for(None, torch.device("cpu"))
    assert isinstance(found, GlooCommunicator)
    return found


def bytes_in_file() -> int:
    """What this process's own file takes, whoever has mapped it."""
    return os.fstat(communicator()._memory._file_fd).st_blocks * 512


def bytes_resident() -> int:
    """What of this rank's file, and of the others', counts as memory of this process."""
    found, shared = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):  # a new map
            shared = "/memfd:zero3" in line
        elif shared and words[0] == "Rss:":
            found += int(words[1]) * 1024
    return found


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def assert_trained_as_plain(module: nn.Module) -> None:
    plain = layers()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        plain(torch.ones(2, WIDTH)).mean().backward()
        optimizer.step()
    assert all(torch.allclose(*both, atol=1e-6) for both in zip(module.parameters(), plain.parameters(), strict=True))


def train(rank: Rank, options: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """After each of three steps: what is left of the shared memory, and what when the others have done it too; its most meanwhile."""
    before = bytes_resident()  # of an earlier run's groups in this process
    ddp = DistributedDataParallel(layers(), bucket_cap_mb=8)
    optimizer = zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, **options)
    if "overlap_with_ddp" in options:
        ddp.register_comm_hook(None, optimizer.hook(ddp))
    mine, left, left_by_all, most = communicator(), [], [], []
    assert mine.shares_memory
    trim = HostMemory.trim

    def trim_and_tell(memory: HostMemory) -> None:
        most.append(memory.nbytes)
        trim(memory)

    with mock.patch.object(HostMemory, "trim", trim_and_tell):
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.ones(2, WIDTH)).mean().backward()
            optimizer.step()
            left.append(bytes_in_file())
            dist.barrier()  # now all have read all
            give_memory_back(mine)
            dist.barrier()
            left_by_all.append(max(bytes_in_file(), bytes_resident() - before))
            dist.barrier()
    assert_trained_as_plain(ddp.module)
    return left, left_by_all, most[::2]


@pytest.mark.parametrize("options", [{}, {"parameters_as_bucket_view": True}, {"overlap_with_ddp": True}], ids=str)
def test_zeroredundancyoptimizer_gives_shared_memory_back_after_each_step(options: dict[str, bool]) -> None:
    for left, left_by_all, most in on_ranks(2, train, options, debug="OFF"):
        assert len(left) == len(left_by_all) == len(most) == 3
        assert max(left_by_all) < HEADERS, "half of 24 MB was there"
        # A rank that is ahead puts down as much again as the other has yet to read, and leaves gaps.
        assert 0 < max(most) < 3 * PIECES_BYTES
        assert max(left) < 3 * PIECES_BYTES + HEADERS


def train_by_sockets(rank: Rank) -> bool:
    with mock.patch.dict(os.environ, {"ZERO3_HOST_MEMORY": "0"}):
        ddp = DistributedDataParallel(layers(), bucket_cap_mb=8)
        optimizer = zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ddp(torch.ones(2, WIDTH)).mean().backward()
            optimizer.step()
        assert_trained_as_plain(ddp.module)
        return communicator().shares_memory


def test_zeroredundancyoptimizer_without_shared_memory() -> None:
    assert on_ranks(2, train_by_sockets, debug="OFF") == [False, False]


def leaves_what_is_unread(rank: Rank) -> Tensor:
    """What lies there for another layer, and has not been looked at, is still there afterwards."""
    layers = communicator(), communicator()
    layers[1].channel = 1
    full = [torch.empty(2 * MEGABYTE) for _ in layers]
    slices = [torch.full((MEGABYTE,), float(10 * number + rank.number)) for number in range(2)]
    of_other_layer = layers[1].all_gather(full[1], slices[1])
    layers[0].all_gather(full[0], slices[0]).wait()
    dist.barrier()
    give_memory_back(layers[0])
    dist.barrier()
    lying = bytes_in_file()
    assert 4 * MEGABYTE <= lying < 5 * MEGABYTE
    of_other_layer.wait()
    dist.barrier()
    give_memory_back(layers[1])
    assert bytes_in_file() < HEADERS
    dist.barrier()
    layers[0].all_gather(full[0], slices[1]).wait()  # asks for the memory anew
    assert full[0][0] == 10.0 and full[0][-1] == 11.0
    return full[1]


def test_shared_memory_that_others_have_yet_to_read_is_not_given_back() -> None:
    for full in on_ranks(2, leaves_what_is_unread):
        assert torch.equal(full, torch.cat([torch.full((MEGABYTE,), 10.0), torch.full((MEGABYTE,), 11.0)]))


def where_madvise_is_refused(rank: Rank) -> bool:
    """As in some sandboxes: the memory stays, and is used again."""
    mine = communicator()
    outbox = mine._memory._outboxes[rank.number]
    memory = mock.MagicMock(wraps=outbox.memory)
    full = torch.empty(2 * MEGABYTE)
    for _ in range(2):
        mine.all_gather(full, torch.full((MEGABYTE,), float(rank.number))).wait()
        dist.barrier()
        with mock.patch.object(outbox, "memory", memory):
            memory.madvise.side_effect = OSError(22, "Invalid argument")
            give_memory_back(mine)
        dist.barrier()
        assert bool((full.view(2, -1) == torch.tensor([[0.0], [1.0]])).all())
    assert memory.madvise.call_count == 2
    return bytes_in_file() < 5 * MEGABYTE


def test_shared_memory_stays_where_madvise_is_refused() -> None:
    assert on_ranks(2, where_madvise_is_refused) == [True, True]
