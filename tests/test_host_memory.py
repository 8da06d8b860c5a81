"""Memory between the processes of one host: who finds whom, what happens to those who wait, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import platform
import signal
import struct
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.processes import PROMPT, Outcome, Rank, on_ranks, try_on_ranks
from zero3 import Zero3Layer, Zero3Sequential, neighbours
from zero3.collectives import communicator_for
from zero3.gloo import GlooCommunicator
from zero3.host_memory import HostMemory

CPU = torch.device("cpu")
served = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "pidfd_open"), reason="Linux on x86-64")
pytestmark = served


def communicator() -> GlooCommunicator:
    found = communicator_for(None, CPU)
    assert isinstance(found, GlooCommunicator)
    return found


def gather(rank: Rank, length: int = 1000) -> Tensor:
    full = torch.empty(length * rank.world_size)
    communicator().all_gather(full, torch.full((length,), float(rank.number))).wait()
    return full


def memory() -> HostMemory:
    return communicator()._memory


def open_files() -> list[str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.islink(link)]


# -- who finds whom


def met(rank: Rank, **others: Any) -> tuple[int, ...]:
    """The ranks that this one finds near, while for rank 1 some function of `neighbours` gives another answer."""
    changes = [mock.patch.object(neighbours, name, return_value=value) for name, value in others.items() if rank.number == 1]
    for change in changes:
        change.start()
    try:
        mine = communicator()
        own, found = neighbours.meet(rank.number, rank.world_size, lambda payload: mine.exchange(payload, CPU))
        assert (own >= 0) == bool(found)
        for neighbour in found.values():
            neighbour.close()
        if own >= 0:
            os.close(own)
        return tuple(found)
    finally:
        for change in changes:
            change.stop()


def test_processes_of_one_host_are_near() -> None:
    assert on_ranks(3, met) == [(1, 2), (0, 2), (0, 1)]


def met_apart(rank: Rank, name: str) -> tuple[int, ...]:
    elsewhere: dict[str, Any] = {"_boot": b"1" * 36, "_network": 7, "_visit": None, "_new_file": None}
    return met(rank, **{name: elsewhere[name]})


@pytest.mark.parametrize("name", ["_boot", "_network", "_visit", "_new_file"])
def test_who_is_elsewhere_is_not_near(name: str) -> None:
    """Another host; another network; a process whose file can't be opened; one that has none. One-sided sight is none.

    So rank 1 has no neighbour, and ranks 0 and 2 would have one: then nobody has any.
    """
    assert on_ranks(2, met_apart, name) == [(), ()]
    assert on_ranks(3, met_apart, name) == [(), (), ()]


def met_on_two_hosts(rank: Rank) -> tuple[int, ...]:
    with mock.patch.object(neighbours, "_network", return_value=rank.number % 2):
        return met(rank)


def test_hosts_of_equally_many_ranks() -> None:
    assert on_ranks(4, met_on_two_hosts) == [(2,), (3,), (0,), (1,)]


def test_a_number_that_means_another_file_is_noticed() -> None:
    file = os.memfd_create("test")
    try:
        os.pwrite(file, b"x" * neighbours.TOKEN_BYTES, 0)
        before = len(open_files())
        assert neighbours._visit(os.getpid(), file, b"y" * neighbours.TOKEN_BYTES) is None
        assert neighbours._visit(os.getpid(), 10**6, b"x" * neighbours.TOKEN_BYTES) is None
        assert len(open_files()) == before
        found = neighbours._visit(os.getpid(), file, b"x" * neighbours.TOKEN_BYTES)
        assert found is not None
        found.close()
    finally:
        os.close(file)


def one_memory(rank: Rank) -> bool:
    gather(rank)
    return memory() is memory() and communicator_for(dist.new_group(), CPU)._memory is not memory()  # type: ignore[attr-defined]


def test_a_group_has_one_memory_for_all_its_layers() -> None:
    assert all(on_ranks(2, one_memory))


# -- those who wait


def waits_for_one_that_dies(rank: Rank) -> None:
    gather(rank)
    if rank.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    gather(rank)


def waits_for_one_that_leaves(rank: Rank) -> None:
    gather(rank)
    if rank.number == 1:
        dist.destroy_process_group()
        time.sleep(PROMPT)
    gather(rank)


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


# -- what is left behind


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
            found.append(memory()._headers[rank.number][3])
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
    return memory()._headers[0][3], found


def test_a_transfer_that_is_given_up_keeps_no_place() -> None:
    for places, found in on_ranks(2, gives_up):
        assert places <= 4
        assert torch.equal(found, torch.cat([torch.zeros(1000), torch.ones(1000)]))


def forgets(rank: Rank) -> tuple[bool, bool]:
    gather(rank)
    during = any("memfd:zero3" in name for name in open_files())
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()
    return during, any("memfd:zero3" in name for name in open_files())


def test_a_group_that_is_destroyed_takes_its_memory_along() -> None:
    assert on_ranks(2, forgets, fresh=True) == [(True, False)] * 2


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
