"""Checkpoints and state dicts of what rests in files: the same bytes as without offload, and no memory for copies."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.offload.test_offload_faults import trained
from tests.offload.test_offload_processes import anonymous, sharded
from tests.support import disk
from tests.support.models import mlp
from tests.support.offloaded import backward, disk_is_full, in_files, same, small, state_of, values_of, wrapped
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks


def ready(group: ThreadCommunicator, place: Path | None, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped(group, place)
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
    trained(model, optimizer, group.rank, group.world_size, range(steps))
    return model, optimizer


def bytes_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.glob("data-*/*")}


@pytest.mark.parametrize("background", [False, True])
def test_save_checkpoint_of_files_has_the_same_bytes(background: bool, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        for name, place in (("without", None), ("with", tmp_path)):
            model, optimizer = ready(group, place)
            saving = zero3.save_checkpoint(tmp_path / name, model, optimizer, background=background)
            trained(model, optimizer, group.rank, 2, range(2, 4))
            saving.wait()

    run_ranks(2, body)
    found = bytes_of(tmp_path / "with")
    assert len(found) == 4 and found == bytes_of(tmp_path / "without")


def test_save_checkpoint_in_the_background_copies_files_to_a_file(tmp_path: Path) -> None:
    may_write = threading.Event()

    def body(group: ThreadCommunicator) -> None:
        model, optimizer = ready(group, tmp_path)
        expected = [value.clone() for value in [*values_of(model), *state_of(optimizer)]]
        saving = zero3.save_checkpoint(tmp_path / "saved", model, optimizer, background=True)
        copies = [each for entries, _ in saving._files.values() for each in entries.values() if each.numel()]
        assert in_files(copies)
        del copies
        trained(model, optimizer, group.rank, 2, range(2, 4))
        may_write.set()
        saving.wait()
        zero3.load_checkpoint(tmp_path / "saved", model, optimizer)
        assert same([*values_of(model), *state_of(optimizer)], expected)

    with disk.held(may_write):
        run_ranks(2, body)


def test_save_checkpoint_without_room_for_copies_is_one_error_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, unlucky = os.posix_fallocate, set[int]()
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: disk_is_full() if threading.get_ident() in unlucky else allocate(*given))

    def body(group: ThreadCommunicator) -> str:
        model, optimizer = ready(group, tmp_path)
        zero3.save_checkpoint(tmp_path / "saved", model, optimizer)
        before = bytes_of(tmp_path / "saved")
        trained(model, optimizer, group.rank, 2, range(2, 3))
        if group.rank == 1:
            unlucky.add(threading.get_ident())
        with pytest.raises(OSError, match=r"rank 1: .* has no room for .* more bytes") as caught:
            zero3.save_checkpoint(tmp_path / "saved", model, optimizer, background=True)
        group.exchange(b"", torch.device("cpu"))
        assert bytes_of(tmp_path / "saved") == before
        unlucky.clear()
        trained(model, optimizer, group.rank, 2, range(3, 4))
        zero3.save_checkpoint(tmp_path / "saved", model, optimizer)
        assert bytes_of(tmp_path / "saved") != before
        return str(caught.value)

    assert len(set(run_ranks(2, body))) == 1


def held_while_saving(rank: Rank, directory: str | None, background: bool) -> tuple[int, int]:
    """How much the process's own memory grows, at most, and the bytes that are written."""
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed is not kept for the copies
    model: Any = sharded(directory)
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), fused=True))
    model(torch.ones(1, model[0].in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, most, written = anonymous(), [0], [0]

    def watched(file: Any, views: list[memoryview]) -> None:
        most[0] = max(most[0], anonymous() - before)
        written[0] += sum(map(len, views))
        disk.OPERATIONS["write"](file, views)

    with disk.replaced("write", watched):
        zero3.save_checkpoint(rank.scratch / f"saved-{background}", model, optimizer, background=background).wait()
    return most[0], written[0]


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_save_checkpoint_of_files_takes_no_anonymous_memory(background: bool, tmp_path: Path) -> None:
    with_it, without = (on_ranks(2, held_while_saving, directory, background, fresh=True) for directory in (str(tmp_path), None))
    for (mine, written), (theirs, as_many) in zip(with_it, without, strict=True):
        assert abs(written - as_many) < 10_000  # the manifest has other tokens
        assert mine < written // 8
        assert not background or theirs > 0.9 * written


def test_state_dict_and_load_state_dict(tmp_path: Path) -> None:
    """A state that was saved without offload is loaded with it, and the other way round; what is loaded is in files again."""
    runs = {}
    for place in (None, tmp_path):
        model = small(place)
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
        backward(model)
        optimizer.step()
        runs[place] = model, optimizer, [value.clone() for value in state_of(optimizer)]
    saved = {place: optimizer.state_dict() for place, (_, optimizer, _) in runs.items()}
    assert str(saved[None]) == str(saved[tmp_path])
    for place, other in ((None, tmp_path), (tmp_path, None)):
        model, optimizer, before = runs[place]
        optimizer.load_state_dict(saved[other])
        assert same(state_of(optimizer), before)
        if place is not None:
            assert in_files(state_of(optimizer))
        optimizer.step()
    assert same(values_of(runs[None][0]), values_of(runs[tmp_path][0]))


@pytest.mark.parametrize("in_backward", [False, True])
def test_checkpoint_goes_on_with_more_ranks(in_backward: bool, tmp_path: Path) -> None:
    def first(group: ThreadCommunicator) -> None:
        model = wrapped(group, tmp_path, mlp())
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1), in_backward=in_backward)
        trained(model, optimizer, group.rank, group.world_size, range(3))
        zero3.save_checkpoint(tmp_path / "saved", model, optimizer)

    def second(group: ThreadCommunicator) -> list[Tensor]:
        found = []
        for place in (None, tmp_path):
            model = wrapped(group, place, mlp())
            optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1), in_backward=in_backward)
            zero3.load_checkpoint(tmp_path / "saved", model, optimizer)
            assert place is None or in_files(state_of(optimizer))
            trained(model, optimizer, group.rank, group.world_size, range(3))
            found.append([*values_of(model), *state_of(optimizer)])
        assert in_files(state_of(optimizer))
        assert same(*found)
        return found

    run_ranks(2, first)
    run_ranks(3, second)
