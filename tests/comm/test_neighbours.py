"""Which ranks find that they can share memory."""

from __future__ import annotations

import os
import resource
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from tests.comm.test_collectives import communicator
from tests.comm.test_shared_memory import CPU, gather, memory, open_files, served
from tests.support.processes import Rank, on_ranks
from zero3.comm.factory import communicator_for
from zero3.comm.shared_memory import neighbours

pytestmark = served


def met(rank: Rank, **others: Any) -> tuple[int, ...]:
    """The ranks that this one finds near, while for rank 1 some function of `neighbours` gives another answer, or raises it."""
    how = {name: "side_effect" if isinstance(value, OSError) else "return_value" for name, value in others.items()}
    changes = [mock.patch.object(neighbours, name, **{how[name]: value}) for name, value in others.items() if rank.number == 1]
    for change in changes:
        change.start()
    try:
        mine = communicator()
        before = len(open_files())
        own, found = neighbours.meet(rank.number, rank.world_size, 1 << 16, lambda payload: mine.exchange(payload, CPU))
        assert (own is not None) == bool(found)
        near = tuple(found)
        while found:
            os.close(found.popitem()[1].process_fd)
        if own is not None:
            os.close(own.file_fd)
        del own
        assert len(open_files()) == before
        return near
    finally:
        for change in changes:
            change.stop()


def test_processes_of_one_host_are_near() -> None:
    assert on_ranks(3, met) == [(1, 2), (0, 2), (0, 1)]


def met_apart(rank: Rank, name: str) -> tuple[int, ...]:
    elsewhere: dict[str, Any] = {"_boot": b"1" * 36, "_network": 7, "_visit": None, "_new_file": None}
    return met(rank, **{name: elsewhere[name]})


def met_in_a_sandbox(rank: Rank, name: str) -> tuple[int, ...]:
    if name != "ulimit -f":
        return met(rank, **{name: FileNotFoundError(2, "/proc is not what it was")})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.number == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, before[1]))
    try:
        return met(rank)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["_boot", "_network", "ulimit -f"])
def test_who_can_have_no_memory_for_others_has_no_neighbours(name: str) -> None:
    assert on_ranks(2, met_in_a_sandbox, name) == [(), ()]


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
    token = b"x" * neighbours.TOKEN_BYTES
    file, other = os.memfd_create("zero3"), os.memfd_create("another")
    pipe = os.pipe()
    try:
        for each in (file, other):
            os.pwrite(each, token, 0)
        before = len(open_files())
        assert neighbours._visit(os.getpid(), file, b"y" * neighbours.TOKEN_BYTES) is None
        for number in (10**6, other, pipe[0]):
            assert neighbours._visit(os.getpid(), number, token) is None
        assert len(open_files()) == before
        found = neighbours._visit(os.getpid(), file, token)
        assert found is not None
        assert found.memory[: len(token)] == token
        os.close(found.process_fd)
    finally:
        for each in (file, other, *pipe):
            os.close(each)


def one_memory(rank: Rank) -> bool:
    gather(rank)
    return memory() is memory() and communicator_for(dist.new_group(), CPU)._memory is not memory()  # type: ignore[attr-defined]


def test_a_group_has_one_memory_for_all_its_layers() -> None:
    assert all(on_ranks(2, one_memory))
