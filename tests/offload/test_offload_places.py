"""Where `ShardingPolicy(offload=)` may put what it offloads, and what it refuses."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.offload.test_offload import Model, assert_same, on_ranks, train
from tests.support.inside import chunks_of, whole_bytes
from tests.support.models import WIDTH, seeded
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3 import ShardingPolicy


def all_raise(world_size: int, kind: type[Exception], match: str, offload: Callable[[int], Any]) -> None:
    copies = [seeded(Model)[0] for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        with pytest.raises(kind, match=match):
            zero3.shard(copies[group.rank], policy=ShardingPolicy(offload=offload(group.rank)), process_group=group)
        assert zero3.is_sharded(copies[group.rank]) is False

    run_ranks(world_size, body)


def test_a_directory_that_one_rank_does_not_have(tmp_path: Path) -> None:
    all_raise(2, ValueError, "rank 1: .*none' can't hold what is offloaded.*Name a directory", lambda rank: tmp_path / ["", "none"][rank])


def test_ranks_that_differ(tmp_path: Path) -> None:
    all_raise(2, ValueError, "rank 0: .*'offload': 'cpu'.*; rank 1: .*'offload': 'disk'", lambda rank: ["cpu", tmp_path][rank])


def test_hosts_may_have_different_directories(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    copies = [seeded(Model)[0] for _ in range(2)]

    def body(group: ThreadCommunicator) -> list[Tensor]:
        policy = ShardingPolicy(offload=tmp_path / "ab"[group.rank])
        return train(zero3.shard(copies[group.rank], policy=policy, process_group=group), group)

    assert_same(run_ranks(2, body), on_ranks(2, train, None))


@pytest.mark.parametrize("room", [1, 3])
def test_a_full_disk_on_one_rank_is_one_error_and_nothing_has_changed(room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = os.posix_fallocate, [1] * room

    def refuse(*arguments: Any) -> None:
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        left.pop()
        real(*arguments)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    all_raise(2, OSError, r"rank \d: .*has no room for \d+ more bytes of what is offloaded.*No space left", lambda rank: tmp_path)


def test_room_for_all_layers_is_looked_for_before_the_first_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers of all ranks at once, because ranks may share a disk."""
    model, sizes = seeded(Model)[0], list[int]()
    monkeypatch.setattr(
        os, "posix_fallocate", lambda descriptor, offset, nbytes: sizes.append(nbytes) or os.truncate(descriptor, offset + nbytes)
    )
    zero3.shard(model, policy=ShardingPolicy(offload=tmp_path))
    layers = sum(map(bool, whole_bytes(model).values()))
    asked, taken = sizes[:layers], sizes[layers:]
    assert sum(asked) == sum(chunk.shard.nbytes * (1 + chunk.shard.requires_grad) for chunk in chunks_of(model))
    assert sum(asked) <= sum(taken)
    model(torch.ones(2, WIDTH, dtype=torch.float64)).sum().backward()
    assert sizes == asked + taken, "gradients have their room before the first comes"


@pytest.mark.parametrize("wrong", [1, True, b"/tmp", ["/tmp"], ""])
def test_what_is_no_place_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r'offload must be "cpu", a directory or None, found'):
        ShardingPolicy(offload=wrong)


def test_a_relative_directory_is_that_of_the_policys_making(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    policy = zero3.ShardingPolicy(offload="here")
    monkeypatch.chdir("/")
    assert policy.offload == str(tmp_path / "here")
    assert zero3.ShardingPolicy(offload="cpu").offload == "cpu"
