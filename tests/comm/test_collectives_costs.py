"""The transfers that replace gloo's own: only the needed bytes travel, beside the computation."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.comm.test_collectives import by, communicator, torch_reduce_scatter
from tests.support.processes import Rank, on_ranks


def bytes_sent() -> int:
    """What this process has sent on its sockets and the other end acknowledged, as Linux counts it (TCP_INFO).

    The loopback's own counter would do, if nothing else on the machine used it.
    """
    while True:
        total = on_their_way = 0
        for descriptor in os.listdir("/proc/self/fd"):
            path = f"/proc/self/fd/{descriptor}"
            if os.path.islink(path) and os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                        information = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        total += struct.unpack_from("Q", information, 120)[0]  # tcpi_bytes_acked
                        on_their_way += struct.unpack_from("I", information, 24)[0]  # tcpi_unacked
        if not on_their_way:  # a last acknowledgement may be late by 40 ms
            return total
        time.sleep(0.001)


def bytes_sent_by_each(rank: Rank, length: int) -> dict[str, int]:
    full, shard = torch.ones(length * rank.world_size), torch.ones(length)
    operations = {
        "our reduce_scatter": lambda: communicator().reduce_scatter(shard, full).wait(),
        "torch's reduce_scatter": lambda: torch_reduce_scatter(shard, full),
        "our all_gather": lambda: communicator().all_gather(full, shard).wait(),
    }
    sent = {}
    for name, operation in operations.items():
        dist.barrier()
        before = bytes_sent()
        operation()
        dist.barrier()
        sent[name] = bytes_sent() - before
    dist.barrier()  # whoever leaves closes connections that others may still be counting
    return sent


@pytest.mark.skipif(sys.platform != "linux", reason="counts bytes by Linux's TCP_INFO")
@pytest.mark.parametrize("world_size", [2, 4])
def test_only_the_needed_bytes_travel(world_size: int) -> None:
    length = 500_001
    needed = (world_size - 1) * length * 4  # each rank has something for each other rank, once
    for sent in on_ranks(world_size, by, "memory", bytes_sent_by_each, length, debug="OFF"):
        assert max(sent["our reduce_scatter"], sent["our all_gather"]) < 0.02 * needed  # what the first meeting and barriers say
    for sent in on_ranks(world_size, by, "sockets", bytes_sent_by_each, length, debug="OFF"):
        assert needed <= sent["our reduce_scatter"] <= 1.01 * needed
        assert needed <= sent["our all_gather"] <= 1.01 * needed
        assert sent["torch's reduce_scatter"] >= 1.9 * needed, "torch has become better: drop our own"


# -- beside the computation


def waits(rank: Rank, kind: str) -> tuple[float, float, float]:
    """Seconds to begin a transfer, to wait for it at once, and to wait for another one after a sleep."""
    length, mine = 8_000_000, communicator()
    full, shard = torch.ones(length * rank.world_size), torch.ones(length)

    def begin() -> object:
        return mine.all_gather(full, shard) if kind == "all_gather" else mine.reduce_scatter(shard, full)

    begin().wait()  # memory is touched for the first time
    dist.barrier()
    began = time.perf_counter()
    pending = begin()
    begun = time.perf_counter()
    pending.wait()
    waited = time.perf_counter()
    dist.barrier()
    pending = begin()
    time.sleep(0.2 + 3 * (waited - began))  # a slow machine gets more time
    slept = time.perf_counter()
    pending.wait()
    return begun - began, waited - begun, time.perf_counter() - slept


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_transfer_goes_on_beside_the_computation(kind: str) -> None:
    for _ in range(5):  # a busy machine may spoil a measurement
        measured = on_ranks(2, by, "sockets", waits, kind, debug="OFF")
        # 64 MB over the loopback take tens of ms; after the sleep all that is left is a reduction's addition, some 4 ms
        if all(after < 0.3 * at_once for _, at_once, after in measured):
            return
    raise AssertionError(f"(begin, wait at once, wait after a sleep), on each rank: {measured}")
