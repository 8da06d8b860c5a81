"""Memory between the processes of one host: what happens to those who wait."""

from __future__ import annotations

import os
import platform
import signal
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.comm.test_collectives import communicator
from tests.support.processes import PROMPT, Rank, on_ranks, try_on_ranks
from zero3 import Zero3Layer, Zero3Sequential
from zero3.comm.shared_memory.host_memory import HostMemory

CPU = torch.device("cpu")
served = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "pidfd_open"), reason="Linux on x86-64")
pytestmark = served


def gather(rank: Rank, length: int = 1000) -> Tensor:
    full = torch.empty(length * rank.world_size)
    communicator().all_gather(full, torch.full((length,), float(rank.number))).wait()
    return full


def memory() -> HostMemory:
    return communicator()._memory


def open_files() -> list[str]:
    """But for sockets: gloo's threads close those of an earlier group when they come to it."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return [link for link in found if not link.startswith("socket:")]


def waits_for_one_that_dies(rank: Rank) -> None:
    gather(rank)
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gather(rank)


def waits_for_one_that_leaves(rank: Rank) -> None:
    """Rank 1's process lives on until rank 0 has been told."""
    gather(rank)
    told, until = rank.scratch / "told", time.monotonic() + PROMPT
    if rank.number == 1:
        dist.destroy_process_group()
        while not told.exists() and time.monotonic() < until:
            time.sleep(0.01)
        return
    try:
        gather(rank)
    finally:
        told.touch()


@pytest.mark.parametrize("body", [waits_for_one_that_dies, waits_for_one_that_leaves])
def test_who_waits_for_a_rank_that_is_gone_is_told_at_once(body: Any) -> None:
    first, _ = try_on_ranks(2, body, fresh=True, join_timeout=PROMPT * 3)
    assert first.error == "RuntimeError"
    assert "the process of rank 1 has ended, or has left the process group" in first.text
    assert first.seconds < PROMPT


def waits_for_one_that_sleeps(rank: Rank) -> None:
    gather(rank)
    if rank.number == 0:
        gather(rank)
    else:
        time.sleep(4)


def test_who_waits_for_a_silent_rank_is_told_when_the_groups_timeout_is_over() -> None:
    first, second = try_on_ranks(2, waits_for_one_that_sleeps, fresh=True, group_timeout=2.0)
    assert (first.error, second.error) == ("RuntimeError", "")
    assert "Timed out waiting 2 s for rank 1" in first.text


def moves_other_lengths(rank: Rank) -> None:
    gather(rank, length=10 + rank.number)


def test_lengths_that_differ_are_an_error_on_both() -> None:
    """gloo itself ends one of the processes, and tells the other that all went well."""
    outcomes = try_on_ranks(2, moves_other_lengths, fresh=True)
    assert [outcome.error for outcome in outcomes] == ["RuntimeError"] * 2
    assert "rank 1 sent 44 bytes, expected 40" in outcomes[0].text
    assert "rank 0 sent 40 bytes, expected 44" in outcomes[1].text


def last_words(rank: Rank) -> Tensor | None:
    """Rank 1 takes part in a gather, and is gone before rank 0 looks at what it brought."""
    gather(rank)
    full = torch.empty(2000)
    pending = communicator().all_gather(full, torch.full((1000,), float(rank.number)))
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1)
    pending.wait()
    return full


def test_what_a_rank_has_said_outlives_it() -> None:
    first, second = try_on_ranks(2, last_words, fresh=True)
    assert (first.error, second.error) == ("", "killed")
    assert torch.equal(first.value, torch.cat([torch.zeros(1000), torch.ones(1000)]))


def waits_twice(rank: Rank) -> Tensor:
    """As who tidies up after an exception does."""
    full = torch.empty(4 * rank.world_size)
    pending = communicator().all_gather(full, torch.full((4,), float(rank.number)))
    pending.wait()
    pending.wait()
    return full


def test_a_transfer_may_be_waited_for_again() -> None:
    for full in on_ranks(2, waits_twice):
        assert full.tolist() == [0.0] * 4 + [1.0] * 4


def named_failure(rank: Rank) -> None:
    model = Zero3Sequential([Zero3Layer(nn.Linear(4, 4))])
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    model(torch.ones(2, 4))


def test_a_model_says_what_it_was_waiting_for() -> None:
    first, _ = try_on_ranks(2, named_failure, fresh=True)
    assert "rank 0 of 2" in first.text
    assert first.error == "RuntimeError"
