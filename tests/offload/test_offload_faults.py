"""Disks that fill up and directories that vanish, under `offload_optimizer`: one error on all ranks, and the last checkpoint is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import mlp, step
from tests.support.offloaded import in_files, odd, same, state_of, values_of, wrapped
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, in_sequence
from zero3.scratch.mapped_files import MappedFiles
from zero3.stores.files import Files


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int, numbers: range) -> None:
    for number in numbers:
        step(model, Turn(rank, number, world_size))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_directory_that_vanishes_changes_nothing(in_backward: bool, after: int, tmp_path: Path) -> None:
    """The files have no names, and all that a step needs is there before the first one."""

    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path / str(group.rank)):
            if place is not None:
                place.mkdir()
            model = wrapped(group, place)
            optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
            optimizer = zero3.offload_optimizer(optimizer, in_backward=in_backward)
            trained(model, optimizer, group.rank, 2, range(after))
            if place is not None:
                shutil.rmtree(place)
            trained(model, optimizer, group.rank, 2, range(after, 3))
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found) and in_files(state_of(optimizer))

    run_ranks(2, body)


def test_a_directory_that_vanished_before_offload_optimizer_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> str:
        place = tmp_path / str(group.rank)
        place.mkdir()
        model = wrapped(group, place)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        if group.rank == 1:
            place.rmdir()
        with pytest.raises(ValueError, match=f"rank 1: .*{tmp_path}/1.* can't hold what is offloaded.*Name a directory") as caught:
            zero3.offload_optimizer(optimizer)
        trained(model, optimizer, group.rank, 2, range(2))  # as before, with the state in memory
        assert not in_files(state_of(optimizer))
        return str(caught.value)

    assert len(set(run_ranks(2, body))) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of less than a megabyte, where it can be mounted."""
    if os.system(f"mount -t tmpfs -o size=700k none {tmp_path} 2> /dev/null"):
        pytest.skip("no file system can be mounted here")
    yield tmp_path
    os.system(f"umount {tmp_path}")


def out_of_room(rank: Rank, directory: str) -> tuple[str, bool]:
    """Trains, saves, and then asks for more room than the disk of rank 1 has. Returns the error, and whether the checkpoint is whole."""
    place = Path(directory) if rank.number == 1 else rank.scratch
    model = in_sequence(mlp(), None, zero3.ShardingPolicy(offload=rank.scratch))
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
    step(model, Turn(rank.number, 0, rank.world_size))
    optimizer.step()
    zero3.save_checkpoint(rank.scratch / "saved", model, optimizer)
    wide = nn.Linear(400, 400)
    large = zero3.Zero3Layer(wide, policy=zero3.ShardingPolicy(offload=place))
    try:
        zero3.offload_optimizer(torch.optim.AdamW(large.parameters()))
    except OSError as error:
        zero3.load_checkpoint(rank.scratch / "saved", model, optimizer)
        return str(error), True
    return "", False


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    (first, whole), (second, whole_too) = on_ranks(2, out_of_room, str(small_disk))
    assert first == second and whole and whole_too
    assert first.startswith("rank 1: ") and "has no room for" in first


def fill(path: Path) -> None:
    left = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
    path.write_bytes(bytes(left))


def fills_up(rank: Rank, directory: str) -> tuple[str, bool]:
    """Trains on while somebody else takes what is left of the disk. Returns the error of a save, and whether all numbers are right."""
    disk, found = Path(directory), list[list[Tensor]]()
    for place in (None, disk):
        model = in_sequence(odd(), None, zero3.ShardingPolicy(offload=place))
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
        trained(model, optimizer, rank.number, rank.world_size, range(1))
        if place is None:
            saved = [value.clone() for value in [*values_of(model), *state_of(optimizer)]]
        else:
            zero3.save_checkpoint(disk / "saved", model, optimizer)
            if rank.number == 0:
                fill(disk / "others")
            torch.distributed.barrier()
        trained(model, optimizer, rank.number, rank.world_size, range(1, 3))
        found.append([*values_of(model), *state_of(optimizer)])
    error = ""
    try:
        zero3.save_checkpoint(disk / "saved", model, optimizer)
    except OSError as caught:
        error = str(caught)
    other = in_sequence(odd(), None, zero3.ShardingPolicy())
    again = torch.optim.AdamW(zero3.get_trainable_chunk(other), lr=0.1)
    zero3.load_checkpoint(disk / "saved", other, again)
    return error, same(*found) and same([*values_of(other), *state_of(again)], saved)


def test_a_disk_that_fills_up_later_ends_no_step_and_harms_no_checkpoint(small_disk: Path) -> None:
    (first, right), (second, right_too) = on_ranks(2, fills_up, str(small_disk))
    assert first == second and "No space left" in first
    assert right and right_too


def test_a_gradient_that_can_not_be_written_early_fails_no_rank_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lands while other ranks wait. It is in memory still, and whoever reads it from the disk one day gets the error."""

    def refuse(*_: Any, wait: bool) -> None:
        raise OSError("not written")

    store = Files(str(tmp_path), far=False)
    store.note_short(True)
    monkeypatch.setattr(MappedFiles, "write", refuse)
    gradient = torch.arange(5000.0)
    kept = store.keep(gradient)
    assert torch.equal(kept, gradient) and in_files([kept])
    with pytest.raises(OSError, match="not written"):
        store.write(kept)
