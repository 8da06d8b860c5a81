"""What a step of `offload_optimizer` reads and writes, and what of it is in memory and on the disk."""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.scratch.test_mapped_files import of_pages
from tests.support.models import WORLDS, mlp, step
from tests.support.offloaded import MAKES, backward, disk_is_full, same, small, state_of, values_of, wait_for, wrapped
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn
from zero3.offload.traffic import Visit
from zero3.scratch.mapped_files import MappedFiles


def test_bytes_moved_and_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step reads chunks, gradients and state once, and lets go of each once. The next chunk's numbers come while one is stepped."""
    log: list[tuple[str, int]] = []
    ways, advise, rest_all = {mmap.MADV_DONTNEED: "rest", 22: "read", 23: "write"}, MappedFiles._advise, MappedFiles.rest_all

    def advised(files: MappedFiles, tensor: Tensor, advice: int) -> int:
        if tensor in files:
            log.append((ways.get(advice, "told"), tensor.data_ptr()))
        return advise(files, tensor, advice)

    def rested(files: MappedFiles) -> None:
        log.extend(("rest", address) for address in (mapped.address for mapped in files._mapped))
        rest_all(files)

    monkeypatch.setattr(MappedFiles, "_advise", advised)
    monkeypatch.setattr(MappedFiles, "rest_all", rested)
    model = small(tmp_path)
    chunks = zero3.get_trainable_chunk(model)
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(chunks))
    backward(model)
    optimizer.step()  # makes the state
    optimizer.zero_grad()
    wait_for(optimizer)
    backward(model)
    written = {t.data_ptr(): n for n, chunk in enumerate(chunks) for t in (chunk, *state_of_one(optimizer, chunk))}
    read = {chunk.grad.data_ptr(): n for n, chunk in enumerate(chunks) if chunk.grad is not None}
    log.clear()
    optimizer.step()
    wait_for(optimizer)
    counts = Counter(log)
    assert set(counts.values()) == {1}
    expected = [("write", place) for place in written] + [("read", place) for place in read] + [("rest", at) for at in [*written, *read]]
    assert counts.keys() == set(expected) and len(expected) == 4 * (3 + 1) * 2
    firsts = list(dict.fromkeys((what, (written | read)[place]) for what, place in log))
    assert firsts.index(("write", 1)) < firsts.index(("rest", 0))  # ahead
    assert firsts.index(("rest", 0)) < firsts.index(("write", 2))  # but by one chunk alone


def state_of_one(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[Tensor]:
    return [value for value in optimizer.state[parameter].values() if value.ndim]


@pytest.mark.parametrize("in_backward", [False, True])
def test_state_is_in_files_and_leaves_the_process(in_backward: bool, tmp_path: Path) -> None:
    model = small(tmp_path)
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model)), in_backward=in_backward)
    for _ in range(2):
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
    wait_for(optimizer)
    for value in [*state_of(optimizer), *zero3.get_trainable_chunk(model)]:
        assert of_pages(value, "Rss") == of_pages(value, "Anonymous") == 0


@pytest.mark.parametrize("in_backward", [False, True])
@WORLDS
def test_where_memory_is_short_each_number_is_written_once_a_step(
    world_size: int, in_backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as it has changed. A gradient that is used at once goes nowhere."""
    written, early, put_by = Counter[int](), Counter[int](), Counter[int]()  # by address; by thread, so by rank
    write, put = MappedFiles.write, MappedFiles.put

    def wrote(files: MappedFiles, tensor: Tensor, *, wait: bool) -> None:
        if tensor in files:
            written[tensor.data_ptr()] += wait
            early[threading.get_ident()] += not wait
        write(files, tensor, wait=wait)

    def kept(files: MappedFiles, tensor: Tensor, what: str) -> Tensor | None:
        put_by[threading.get_ident()] += tensor.numel() > 0
        return put(files, tensor, what)

    monkeypatch.setattr(MappedFiles, "is_away", lambda files, tensor: tensor in files)
    monkeypatch.setattr(MappedFiles, "write", wrote)
    monkeypatch.setattr(MappedFiles, "put", kept)

    def body(group: ThreadCommunicator) -> None:
        found, own, steps = [], threading.get_ident(), 3
        for place in (None, tmp_path):
            model = wrapped(group, place)
            optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)), in_backward=in_backward)
            for number in range(steps):
                step(model, Turn(group.rank, number, group.world_size))
                optimizer.step()
                optimizer.zero_grad()
                if place is not None:
                    wait_for(optimizer)
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)
        chunks = [chunk for chunk in zero3.get_trainable_chunk(model) if chunk.numel()]
        assert [written[value.data_ptr()] for value in [*chunks, *state_of(optimizer)]] == [steps] * 3 * len(chunks)
        assert put_by[own] == (0 if in_backward else steps * len(chunks))
        assert early[own] == (0 if in_backward else (steps - 1) * len(chunks))  # the first ones were not known to be dropped

    run_ranks(world_size, body)


@pytest.mark.parametrize("late", ["bring", "let_go", "write"])
def test_a_late_thread_holds_no_gradients(late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the next ones use the same files again, and the disk needs no more than what was reserved."""
    on_time, held = getattr(Visit, late), list[Visit]()
    monkeypatch.setattr(MappedFiles, "is_away", lambda files, tensor: tensor in files)
    monkeypatch.setattr(Visit, late, lambda visit: on_time(visit) if held.append(visit) is None else None)
    model = small(tmp_path)
    optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1))
    before = disk_of(tmp_path)
    for _ in range(3):
        backward(model)
        zero3.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
        wait_for(optimizer)
    assert held and disk_of(tmp_path) == before > 0


def disk_of(place: Path) -> int:
    """The bytes of this process's files without a name in a directory."""
    open_files = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    ours = [file for file in open_files if file.is_symlink() and os.readlink(file).startswith(f"{place}/")]
    return sum(file.stat().st_blocks * 512 for file in ours)


def test_first_step_makes_zeros_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State is never in memory, not even when it is made."""
    model = small(tmp_path, depth=1)
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model)))
    copies: list[Tensor] = []
    monkeypatch.setattr(Tensor, "copy_", lambda self, *given, copy=Tensor.copy_: copies.append(self) or copy(self, *given))
    backward(model)
    before = len(copies)
    optimizer.step()
    assert len(copies) == before and len(state_of(optimizer)) == 2


def test_state_that_finds_no_room_later_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """amsgrad, turned on after the trial, keeps one tensor more."""
    found = []
    for place in (None, tmp_path):
        model = small(place, depth=2)
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
        optimizer.param_groups[0]["amsgrad"] = True
        backward(model)
        with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            patch.setattr(os, "posix_fallocate", disk_is_full)
            optimizer.step()
        assert [str(each.message).startswith("state of the optimizer stays in memory") for each in told] == [True] * (place is not None)
        found.append([*values_of(model), *state_of(optimizer)])
    assert same(*found)


def test_a_gradient_that_finds_no_room_on_one_rank_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller still holds the gradients of the step before, so new ones need new files."""
    allocate, unlucky = os.posix_fallocate, set[int]()
    monkeypatch.setattr(os, "posix_fallocate", lambda *given: disk_is_full() if threading.get_ident() in unlucky else allocate(*given))

    def trained(place: Path | None) -> list[list[Tensor]]:
        def body(group: ThreadCommunicator) -> list[Tensor]:
            model = wrapped(group, place, mlp())
            optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1))
            held = []
            for number in range(3):
                step(model, Turn(group.rank, number, group.world_size))
                optimizer.step()
                held += [chunk.grad for chunk in zero3.get_trainable_chunk(model)]
                optimizer.zero_grad()
                if group.rank == 1:
                    unlucky.add(threading.get_ident())
            return [*values_of(model), *(gradient.clone() for gradient in held if gradient is not None)]

        return run_ranks(2, body)

    expected = trained(None)
    unlucky.clear()
    with pytest.warns(UserWarning, match="a gradient stays in memory"):
        found = trained(tmp_path)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
