"""Clipping with gradients in files: the same bits, each gradient read once, and nobody sees one that is still to be scaled."""

from __future__ import annotations

import errno
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.scratch.test_mapped_files import of_pages
from tests.support.models import WORLDS, mlp, step
from tests.support.offloaded import MAKES, backward, groups_of, same, same_bits, small, state_of, values_of, wait_for, wrapped
from tests.support.ranks import ThreadCommunicator, ThreadMesh, run_mesh, run_ranks
from tests.support.reference import Turn, in_sequence
from zero3.scratch.mapped_files import MappedFiles
from zero3.stores.untouched import UntouchedGradient, to_bring

INF = float("inf")


@pytest.mark.slow
@pytest.mark.parametrize(("order", "max_norm"), [(2.0, 0.1), (2.0, 1e6), (1.0, 0.1), (INF, INF)])
@pytest.mark.parametrize("how", ["chunks", "groups", "whole"])
@WORLDS
def test_same_bits_as_without(world_size: int, how: str, order: float, max_norm: float, tmp_path: Path) -> None:
    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model = wrapped(group, place)
        optimizer = zero3.offload_optimizer(MAKES["adamw"](groups_of(model, how)))
        norms = []
        for number in range(3):
            step(model, Turn(group.rank, number, group.world_size))
            norms.append(zero3.clip_grad_norm_(model, max_norm, order))
            optimizer.step()
            optimizer.zero_grad()
        return [*norms, *values_of(model), *state_of(optimizer)]

    same_bits(world_size, run, tmp_path)


def prepared(group: ThreadCommunicator, place: Path | None, **policy: Any) -> tuple[zero3.Zero3Sequential, torch.optim.Optimizer]:
    """After a step that was clipped, and with the gradients of the next one."""
    model = wrapped(group, place, mlp(), **policy)
    optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)))
    for number in range(2):
        optimizer.zero_grad()
        step(model, Turn(group.rank, number, group.world_size))
        if number == 0:
            zero3.clip_grad_norm_(model, 0.1)
            optimizer.step()
    return model, optimizer


def gradients(model: nn.Module) -> list[Tensor]:
    return [chunk.grad for chunk in zero3.get_trainable_chunk(model) if chunk.grad is not None and chunk.numel()]


def untouched(model: nn.Module) -> list[bool]:
    return [type(gradient) is UntouchedGradient for gradient in gradients(model)]


def test_a_model_with_gradients_that_are_still_to_be_scaled_is_freed_at_once(tmp_path: Path) -> None:
    model, optimizer = prepared_alone(tmp_path)
    zero3.clip_grad_norm_(model, 1e-3)
    assert all(untouched(model))
    chunks = [weakref.ref(chunk) for chunk in zero3.get_trainable_chunk(model)]
    gc.disable()
    try:
        del model, optimizer
        assert [chunk() for chunk in chunks] == [None] * len(chunks)
    finally:
        gc.enable()


@contextmanager
def brought(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """Counts how often the tensor at each address is brought from a file."""
    found: Counter[int] = Counter()
    bring = MappedFiles.bring

    def counted(files: MappedFiles, tensor: Tensor, *, to_write: bool) -> None:
        found[tensor.data_ptr()] += tensor in files
        bring(files, tensor, to_write=to_write)

    with monkeypatch.context() as patch:
        patch.setattr(MappedFiles, "bring", counted)
        yield found


def pages_of(tensors: list[Tensor]) -> int:
    """Bytes of them that are in the process's memory."""
    return sum(of_pages(to_bring(tensor)[0], "Rss") for tensor in tensors)


@pytest.mark.parametrize("max_norm", [1e-3, INF])
def test_a_step_with_clipping_reads_each_gradient_once(max_norm: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clipping itself reads none: norms were taken when gradients landed, and the optimizer multiplies what it has in memory."""
    model = small(tmp_path)
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model)))
    for number in range(2):
        optimizer.zero_grad()
        backward(model)
        with brought(monkeypatch) as by_clipping:
            zero3.clip_grad_norm_(model, max_norm)
        places = {to_bring(gradient)[0].data_ptr() for gradient in gradients(model)}
        assert pages_of(gradients(model)) == 0
        assert by_clipping == (dict.fromkeys(places, 1 if max_norm == INF else 2) if number == 0 else {})
        with brought(monkeypatch) as by_the_step:
            optimizer.step()
            wait_for(optimizer)
        assert {place: by_the_step[place] for place in places} == dict.fromkeys(places, 1)


def test_without_offload_optimizer_clipping_scales_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(tmp_path)
    backward(model)
    for max_norm, times in ((INF, 1), (1e-3, 2)):
        for gradient in gradients(model):
            gradient.add_(0)  # now norms have to be taken anew
        with brought(monkeypatch) as by_clipping:
            zero3.clip_grad_norm_(model, max_norm)
        assert set(by_clipping.values()) == {times}
        assert pages_of(gradients(model)) == 0
        backward(model)
    for chunk in zero3.get_trainable_chunk(model):
        chunk.grad = None
    backward(model)
    with brought(monkeypatch) as by_clipping:
        zero3.clip_grad_norm_(model, 1e-3)
    assert set(by_clipping.values()) == {1}, "norms were taken when gradients landed"
    assert not any(untouched(model))


def test_the_next_gradient_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes while the one before is worked on, and no earlier; those of the chunk before leave."""
    log: list[tuple[str, int]] = []
    rest_all = MappedFiles.rest_all
    monkeypatch.setattr(MappedFiles, "rest_all", lambda files: (log.append(("leave", files._mapped[0].address)), rest_all(files)))
    model = small(tmp_path)
    backward(model)
    number = {gradient.data_ptr(): n for n, gradient in enumerate(gradients(model))}
    monkeypatch.setattr(
        MappedFiles, "bring", lambda files, tensor, *, to_write: log.append(("come", tensor.data_ptr())) if tensor in files else None
    )
    log.clear()
    zero3.clip_grad_norm_(model, INF)
    found = [(what, number[place]) for what, place in log]
    assert found == [("come", 0), ("come", 1), ("leave", 0), ("come", 2), ("leave", 1), ("come", 3), ("leave", 2), ("leave", 3)]


@pytest.mark.parametrize("policy", [{}, {"reduce_dtype": torch.float64}, {"transactional": True}, {"stage": 1}], ids=str)
@WORLDS
def test_accumulation_before_and_after_clipping(world_size: int, policy: dict[str, Any], tmp_path: Path) -> None:
    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model = wrapped(group, place, mlp().float(), **policy)
        optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)))
        norms = []
        for number in range(3):
            for micro in range(4):
                with zero3.no_sync(model) if micro == number else torch.enable_grad():
                    model(Turn(group.rank, 4 * number + micro, group.world_size).tensor(3, 5).float()).pow(2).mean().backward()
                if micro != number:
                    norms.append(zero3.clip_grad_norm_(model, 0.1 * (micro + 1)))
            optimizer.step()
            optimizer.zero_grad(set_to_none=number == 1)
        return [*norms, *values_of(model), *state_of(optimizer)]

    same_bits(world_size, run, tmp_path)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_and_clipping(fused: bool, tmp_path: Path) -> None:
    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model = wrapped(group, place, mlp())
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1, fused=fused))
        scaler, norms = zero3.GradScaler("cpu", init_scale=4.0), []
        for number in range(4):
            optimizer.zero_grad()
            loss = step_loss(model, Turn(group.rank, number, group.world_size))
            scaler.scale(loss * (INF if number == 1 and group.rank == 0 else 1.0)).backward()
            scaler.unscale_(optimizer)
            norms.append(zero3.clip_grad_norm_(model, 0.1))
            scaler.step(optimizer)
            scaler.update()
        return [*(norm for norm in norms if norm.isfinite()), *values_of(model), *state_of(optimizer)]

    same_bits(2, run, tmp_path)


def step_loss(model: nn.Module, turn: Turn) -> Tensor:
    return model(turn.tensor(3, 5)).pow(2).mean()


def test_on_a_mesh(tmp_path: Path) -> None:
    def body(mesh: ThreadMesh) -> None:
        found = []
        for place in (None, tmp_path):
            model = in_sequence(mlp(), mesh, zero3.ShardingPolicy(offload=place))
            optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)))
            for number in range(3):
                step(model, Turn(mesh.rank, number, 4))
                zero3.clip_grad_norm_(model, 0.1)
                optimizer.step()
                optimizer.zero_grad()
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_mesh(2, 2, body)
    run_mesh(2, 1, body)


def test_a_norm_that_is_not_finite(tmp_path: Path) -> None:
    model, optimizer = prepared_alone(tmp_path)
    gradients(model)[0][0] = INF
    with pytest.raises(RuntimeError, match="can't be clipped"):
        zero3.clip_grad_norm_(model, 0.1, error_if_nonfinite=True)
    before = [gradient.clone() for gradient in gradients(model)]
    assert same(before, gradients(model))
    zero3.clip_grad_norm_(model, 0.1)
    optimizer.step()
    assert not any(chunk.isfinite().all() for chunk in values_of(model)[:1])


def prepared_alone(place: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small(place)
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model)))
    for number in range(2):
        optimizer.zero_grad()
        backward(model)
        if not number:
            zero3.clip_grad_norm_(model, 0.1)
    return model, optimizer


def test_a_gradient_that_one_rank_cannot_read_is_an_error_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directories = [tmp_path / str(rank) for rank in range(2)]
    bring = MappedFiles.bring

    def fails(files: MappedFiles, tensor: Tensor, *, to_write: bool) -> None:
        if tensor in files and files._directory == str(directories[1]):
            raise OSError(errno.EIO, "as told")
        bring(files, tensor, to_write=to_write)

    monkeypatch.setattr(MappedFiles, "bring", fails)

    def body(group: ThreadCommunicator) -> None:
        directories[group.rank].mkdir()
        model = wrapped(group, directories[group.rank], mlp())
        step(model, Turn(group.rank, 0, group.world_size))
        before = [gradient.clone() for gradient in gradients(model)]
        with pytest.raises(OSError, match="as told"):
            zero3.clip_grad_norm_(model, 0.1)
        assert same(before, gradients(model))

    run_ranks(2, body)
