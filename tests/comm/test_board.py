"""Ranks meet before the first collective of new layers: a wrong group or mesh is told, and a right one never waits for strangers."""

from __future__ import annotations

import sys
import threading
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.support.inside import states_of
from tests.support.models import mlp, rows
from tests.support.processes import PROMPT, Rank, in_child, on_ranks, try_on_ranks
from zero3.comm import board
from zero3.comm.board import Board, board_for, numbered

Places = list[tuple[str, list[int]]]
"""Where a rank meets whom, one after another."""


def met(*ranks: Places) -> list[str]:
    """What each rank is told: "" if all of its meetings came about."""
    store, told = dist.HashStore(), [""] * len(ranks)

    def live(me: int, places: Places) -> None:
        try:
            for what, members in places:
                with Board(store, what, members, members.index(me)).meeting():
                    pass
        except ValueError as error:
            told[me] = str(error)

    threads = [threading.Thread(target=live, args=(me, places), daemon=True) for me, places in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROMPT)
        assert not thread.is_alive()
    return told


@pytest.fixture(autouse=True)
def soon(monkeypatch: Any) -> None:
    """Ranks that wait ask early where the others are. So a right meeting that is taken for a wrong one shows here."""
    monkeypatch.setattr(board, "_LOOKS", 0.01)
    monkeypatch.setattr(board, "_OTHERS_LOOK", 0.05)


def group(*members: int) -> tuple[str, list[int]]:
    return f"a group of {numbered(members)}", list(members)


def mesh(*shape: int) -> tuple[str, list[int]]:
    return f"a mesh of {shape[0]} x {shape[1]}", [*range(shape[0] * shape[1])]


ALL = group(0, 1, 2, 3)


@pytest.mark.parametrize("ranks", [
    [[ALL]] * 4,
    [[group(0, 1)], [group(0, 1)], [group(2, 3)], [group(2, 3)]],
    [[group(0, 1), ALL], [group(0, 1), ALL], [ALL], [ALL]],  # a teacher of two ranks, a student of all
    [[group(0, 1), group(0, 2)], [group(0, 1), group(1, 3)], [group(2, 3), group(0, 2)], [group(2, 3), group(1, 3)]],  # rows, columns
    [[group(0, 1)] * 20 + [ALL], [group(0, 1)] * 20 + [ALL], [ALL], [ALL]],
    [[group(0, 1), group(0, 3)], [group(1, 2), group(0, 1)], [group(2, 3), group(1, 2)], [group(2, 3), group(0, 3)]],  # one unlocks another
    [[mesh(2, 2), ALL], [mesh(2, 2), ALL], [mesh(2, 2), ALL], [mesh(2, 2), ALL]],
])  # fmt: skip
def test_right_groups_meet(ranks: list[Places]) -> None:
    assert met(*ranks) == [""] * len(ranks)


@pytest.mark.parametrize("ranks", [
    [[mesh(2, 2)], [ALL], [ALL], [ALL]],
    [[mesh(2, 2)], [mesh(4, 1)], [mesh(2, 2)], [mesh(2, 2)]],
    [[group(0, 1)], [group(0, 1, 2)], [group(0, 1, 2)]],
    [[group(0, 1)], [group(1, 2)], [group(0, 2)]],  # each waits for the next
    [[("the first group of 0, 1", [0, 1])], [("another group of 0, 1", [0, 1])]],
    [[group(0, 1), ALL], [group(0, 1), mesh(2, 2)], [ALL], [ALL]],  # after a meeting that was right
])  # fmt: skip
def test_ranks_that_wait_for_each_other_in_different_groups_are_told(ranks: list[Places]) -> None:
    told = met(*ranks)
    assert len(set(told)) == 1, "the same words, also on a rank that comes late"
    assert told[0].startswith("ranks differ in process_group: rank")
    assert len({places[-1][0] for places in ranks if places[-1][0] in told[0]}) > 1


def test_after_a_wrong_group_a_right_one_meets() -> None:
    store = dist.HashStore()
    again = threading.Barrier(2, timeout=PROMPT)

    def live(me: int) -> None:
        with pytest.raises(ValueError, match="ranks differ in process_group"), Board(store, f"the choice of {me}", [0, 1], me).meeting():
            pass
        again.wait()
        for what in ("the choice of 0", "the choice of 1"):
            with Board(store, what, [0, 1], me).meeting():
                pass
        done.append(me)

    done: list[int] = []
    threads = [threading.Thread(target=live, args=(me,), daemon=True) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROMPT)
    assert sorted(done) == [0, 1]


def test_a_rank_whose_transfers_fail_one_after_another_waits_once_for_what_the_others_say(monkeypatch: Any) -> None:
    """After a failure a model awaits all that is under way, which may be a sum for each layer."""
    alone, pauses = Board(dist.HashStore(), *group(0, 1), 0), list[float]()
    monkeypatch.setattr(board, "_TELLING", 0.2)
    monkeypatch.setattr(board.time, "sleep", pauses.append)
    alone.where("", "reducing layer 1", timed_out=False)
    first = len(pauses)
    assert first
    for _ in range(3):
        alone.where("", "reducing layer 0", timed_out=True)
    assert len(pauses) == first


def test_a_transfer_that_timed_out_is_told_of_though_the_store_is_gone() -> None:
    """With the process that held it."""

    class Gone:
        def clone(self) -> Gone:
            return self

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer")

    alone = Board(cast(dist.Store, Gone()), *group(0, 1), 0)
    assert alone.where("shard", "", timed_out=True) == "Every rank has to call shard; rank 1 has not."


# -- real process groups


def sharded(group: Any) -> nn.Module:
    model = zero3.shard(mlp(), [nn.Linear], process_group=group)
    model(rows(2)).sum().backward()
    return model


def with_a_wrong_one(rank: Rank, kind: str) -> None:
    two_by_two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    pairs = [dist.new_group(pair) for pair in ([0, 1], [0, 2], [0, 1, 2])]
    if kind == "mesh":
        given: Any = two_by_two if rank.number == 3 else None
    elif kind == "group":
        given = pairs[0] if rank.number == 0 else pairs[2] if rank.number < 3 else None
    else:
        given = "a word" if rank.number == 0 else two_by_two
    if kind == "group" and rank.number == 3:
        return
    if kind == "ZeroRedundancyOptimizer":
        zero3.ZeroRedundancyOptimizer(mlp().parameters(), torch.optim.SGD, process_group=pairs[2] if rank.number == 0 else None, lr=0.1)
    sharded(given)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names"), [
    ("mesh", ["the group '0' of the ranks 0 to 3", "rank 3: a mesh of 2 x 2 of the ranks 0 to 3"]),
    ("group", ["of the ranks 0, 1; rank", "of the ranks 0 to 2"]),
    ("word", ["rank 0: TypeError: process_group must be a torch", "found str", "a mesh of 2 x 2 of the ranks 0 to 3"]),
    ("ZeroRedundancyOptimizer", ["of the ranks 0 to 2; rank", "the group '0' of the ranks 0 to 3"]),
])  # fmt: skip
@pytest.mark.slow
def test_shard_with_the_wrong_mesh_or_group_on_one_rank_is_told_on_all(kind: str, names: list[str]) -> None:
    outcomes = try_on_ranks(4, with_a_wrong_one, kind)[: 3 if kind == "group" else 4]
    for outcome in outcomes:
        assert outcome.error == "ValueError", outcome
        assert outcome.text == outcomes[0].text
        assert outcome.text.startswith("ranks differ in process_group: ")
        assert all(name in outcome.text for name in names), outcome.text
        assert outcome.seconds < PROMPT


def with_right_ones(rank: Rank) -> None:
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    sharded(pairs[rank.number // 2])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    sharded(mesh)
    if rank.number < 2:
        sharded(pairs[0])
    sharded(None)


@pytest.mark.slow
def test_shard_in_disjoint_groups_and_then_in_all() -> None:
    assert not any(outcome.error for outcome in try_on_ranks(4, with_right_ones))


def in_another_group(rank: Rank) -> None:
    pairs = [dist.new_group(pair) for pair in ([0, 1], [0, 2])]
    dist.barrier()  # nobody leaves before all have their groups
    if rank.number < 2:
        sharded(pairs[rank.number])


@pytest.mark.slow
def test_shard_with_a_group_that_one_rank_is_not_a_member_of_is_told_on_the_others_as_it_ends() -> None:
    first, second, _ = try_on_ranks(3, in_another_group, fresh=True)
    assert second.error == "ValueError"
    assert "not a member" in second.text
    assert first.error == "RuntimeError"
    assert "Every rank has to call shard; rank 1 has not (found at: ValueError: this process is not a member" in first.text
    assert first.seconds < PROMPT


def after_its_end(rank: Rank, replicas: int, forked: bool) -> str:
    model = sharded(init_device_mesh("cpu", (replicas, 2 // replicas), mesh_dim_names=("dp_replicate", "dp_shard")))
    if forked:
        return in_child(lambda: model(rows(2)).sum().backward())
    communicator, held = states_of(model)[0].communicator, dist.group.WORLD
    dist.barrier()
    dist.destroy_process_group()
    assert held is not None
    assert board_for(communicator) is None
    del held
    with pytest.raises(RuntimeError) as error:
        model(rows(2)).sum().backward()
    return f"RuntimeError: {error.value}"


@pytest.mark.skipif(sys.platform == "darwin", reason="forks of a process with threads")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("forked", "says"), [(False, "process group was destroyed"), (True, "was forked from rank")])
def test_a_transfer_of_a_group_that_is_gone_is_named_all_the_same(replicas: int, forked: bool, says: str) -> None:
    """Its ranks tell each other nothing any more: a forked child would write into its parent's connection to the store."""
    for number, text in enumerate(on_ranks(2, after_its_end, replicas, forked, fresh=True)):
        assert text.startswith(f"RuntimeError: rank {number} of 2: "), text
        assert says in text
