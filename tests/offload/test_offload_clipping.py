"""Clipping with gradients in files: the same bits, each gradient read once, and nobody sees one that is still to be scaled."""

from __future__ import annotations

import errno
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.offload.test_offload_optimizer import MAKES, backward, groups_of, same, small, state_of, trained, values_of, wait_for, wrapped
from tests.scratch.test_mapped_files import of_pages
from tests.support.models import WORLDS, mlp, step
from tests.support.ranks import ThreadCommunicator, ThreadMesh, run_mesh, run_ranks
from tests.support.reference import Turn, in_sequence
from zero3.core.untouched import UntouchedGradient, to_bring
from zero3.scratch.mapped_files import MappedFiles

INF = float("inf")


@pytest.mark.parametrize(("order", "max_norm"), [(2.0, 0.1), (2.0, 1e6), (1.0, 0.1), (INF, INF)])
@pytest.mark.parametrize("how", ["chunks", "groups", "whole"])
@WORLDS
def test_same_bits_as_without(world_size: int, how: str, order: float, max_norm: float, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model = wrapped(group, place)
            optimizer = zero3.offload_optimizer(MAKES["adamw"](groups_of(model, how)))
            norms = []
            for number in range(3):
                step(model, Turn(group.rank, number, group.world_size))
                norms.append(zero3.clip_grad_norm_(model, max_norm, order))
                optimizer.step()
                optimizer.zero_grad()
            found.append([*norms, *values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(world_size, body)


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


READS: dict[str, Callable[[nn.Module], list[Tensor]]] = {
    "clone": lambda model: [gradient.clone().as_subclass(Tensor) for gradient in gradients(model)],
    "list": lambda model: [torch.tensor(gradient.tolist(), dtype=gradient.dtype) for gradient in gradients(model)],
    "numpy": lambda model: [torch.from_numpy(gradient.numpy().copy()) for gradient in gradients(model)],
    "array": lambda model: [torch.from_numpy(numpy.asarray(gradient).copy()) for gradient in gradients(model)],
    "dlpack": lambda model: [torch.from_dlpack(gradient).clone() for gradient in gradients(model)],
    "foreach": lambda model: [each.as_subclass(Tensor) for each in torch._foreach_mul(gradients(model), 2.0)],
    "data": lambda model: [gradient.data.clone().as_subclass(Tensor) for gradient in gradients(model)],
    "by name": lambda model: [gradient.clone() for gradient in zero3.named_gradients(model).values()],
    "norms": lambda model: list(zero3.parameter_norms(model).values()),
    "clipping": lambda model: [zero3.clip_grad_norm_(model, 0.01), *READS["clone"](model)],
    "out=": lambda model: [torch.add(g, 1, out=torch.empty(g.shape, dtype=g.dtype)) for g in gradients(model)],
    "strides": lambda model: [torch.tensor(gradient.stride()) for gradient in gradients(model)],
    "zeros": lambda model: [(torch._foreach_zero_(gradients(model)), gradients(model)[0].clone().as_subclass(Tensor))[1]],
}


@pytest.mark.parametrize("way", READS)
@WORLDS
def test_whoever_reads_a_gradient_after_clipping_reads_it_scaled(world_size: int, way: str, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model, optimizer = prepared(group, place)
            held = gradients(model)
            assert place is None or all(untouched(model))
            zero3.clip_grad_norm_(model, 0.1)
            assert place is None or all(untouched(model))
            seen = READS[way](model)
            assert not any(untouched(model)) or way == "zeros"
            optimizer.step()
            found.append([*seen, *(each.as_subclass(Tensor) for each in held), *values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(world_size, body)


@pytest.mark.parametrize("how", ["chunks", "groups", "whole"])
def test_one_that_was_read_leaves_the_others_to_be_scaled(how: str, tmp_path: Path) -> None:
    """Gradients have several classes by then, and torch asks one of them about an operation on all."""

    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model = wrapped(group, place, mlp())
            optimizer = zero3.offload_optimizer(MAKES["sgd"](groups_of(model, how)))
            for number in range(2):
                optimizer.zero_grad()
                step(model, Turn(group.rank, number, group.world_size))
                zero3.clip_grad_norm_(model, 1e-3)
            own = [parameter.grad for each in optimizer.param_groups for parameter in each["params"] if parameter.numel()]
            assert place is None or all(type(gradient) is UntouchedGradient for gradient in own)
            seen = [own[0].sum(), *torch._foreach_mul(own, 2.0)]
            torch._foreach_mul_(own, 3.0)
            optimizer.step()
            found.append([*(each.as_subclass(Tensor) for each in seen), *values_of(model)])
        assert same(*found)

    run_ranks(2, body)


def edit_by_numpy(model: nn.Module) -> None:
    for gradient in gradients(model):
        array = gradient.numpy()
        array *= 3


def edit_by_name(model: nn.Module) -> None:
    for gradient in zero3.named_gradients(model).values():
        gradient.data.mul_(3)


def edit_data(model: nn.Module) -> None:
    for gradient in gradients(model):
        gradient.data.mul_(3)


def replace_one(model: nn.Module) -> None:
    chunk = next(chunk for chunk in zero3.get_trainable_chunk(model) if chunk.numel())
    chunk.grad = chunk.grad * 3


def penalise(model: nn.Module) -> None:
    sum(chunk.pow(3).sum() for chunk in zero3.get_trainable_chunk(model)).backward()


def unscale(model: nn.Module) -> None:
    scaler = zero3.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1))


EDITS = [edit_by_numpy, edit_by_name, edit_data, replace_one, penalise, unscale]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@WORLDS
def test_whoever_edits_a_gradient_before_clipping_changes_the_norm(world_size: int, edit: Any, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model, optimizer = prepared(group, place)
            edit(model)
            norm = zero3.clip_grad_norm_(model, 0.1)
            optimizer.step()
            found.append([norm, *values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(world_size, body)


@pytest.mark.parametrize("way", ["data", "numpy", "by name"])
def test_a_view_that_is_held_since_before_clipping_shows_the_scaled_gradient(way: str, tmp_path: Path) -> None:
    views: dict[str, Callable[[nn.Module], list[Any]]] = {
        "data": lambda model: [gradient.data for gradient in gradients(model)],
        "numpy": lambda model: [gradient.numpy() for gradient in gradients(model)],
        "by name": lambda model: list(zero3.named_gradients(model).values()),
    }

    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model, _ = prepared(group, place)
            held = views[way](model)
            zero3.clip_grad_norm_(model, 0.1)
            found.append([torch.as_tensor(each).clone() for each in held])
        assert same(*found)

    run_ranks(2, body)


@pytest.mark.parametrize("policy", [{}, {"stage": 1}], ids=str)
@WORLDS
def test_a_penalty_may_be_added_after_clipping(world_size: int, policy: dict[str, Any], tmp_path: Path) -> None:
    """Autograd adds it to the gradients without asking anybody."""

    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model, optimizer = prepared(group, place, **policy)
            for number in range(3):
                zero3.clip_grad_norm_(model, 1e-3)
                if number < 2:
                    assert place is None or all(untouched(model))
                    penalise(model)
                if number == 1:
                    zero3.clip_grad_norm_(model, 0.1)
                optimizer.step()
                optimizer.zero_grad()
                step(model, Turn(group.rank, 7 + number, group.world_size))
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(world_size, body)


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


class Unseen(torch.optim.SGD):
    """Reads gradients as an extension module would, without a function of torch that can be overridden."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(torch.Tensor._make_subclass(Tensor, parameter.grad), alpha=group["lr"])


def test_an_optimizer_that_reads_memory_reads_scaled_gradients(tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model = wrapped(group, place, mlp())
            optimizer = zero3.offload_optimizer(Unseen(zero3.get_trainable_chunk(model), lr=0.1))
            trained(model, optimizer, group)
            found.append(values_of(model))
        assert same(*found)

    run_ranks(2, body)


@WORLDS
def test_a_view_of_an_earlier_micro_batch_may_be_written_to(world_size: int, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model, optimizer = prepared(group, place)
            views = [gradient.data for gradient in gradients(model)]
            step(model, Turn(group.rank, 7, group.world_size))
            for view in views:
                view.mul_(3)
            norm = zero3.clip_grad_norm_(model, 0.1)
            optimizer.step()
            found.append([norm, *values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(world_size, body)


def test_the_next_gradient_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comes while the one before is worked on, and no earlier; those of the chunk before leave."""
    log: list[tuple[str, int]] = []
    rest_all = MappedFiles.rest_all
    monkeypatch.setattr(MappedFiles, "rest_all", lambda files: (log.append(("leave", files._places[0][0])), rest_all(files)))
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
    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
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
            found.append([*norms, *values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(world_size, body)


@WORLDS
def test_gradients_whose_parameters_have_hooks_are_read(world_size: int, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model = wrapped(group, place, mlp())
            optimizer = zero3.offload_optimizer(MAKES["adamw"](zero3.get_trainable_chunk(model)))
            views: list[Any] = []
            for chunk in zero3.get_trainable_chunk(model):
                chunk.register_post_accumulate_grad_hook(lambda leaf, views=views: views.append(leaf.grad.data))
            for number in range(3):
                step(model, Turn(group.rank, number, group.world_size))
                assert not any(untouched(model))
                for view in views:
                    view.mul_(2)
                zero3.clip_grad_norm_(model, 0.1)
                optimizer.step()
                optimizer.zero_grad()
                views.clear()
            found.append([*values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(world_size, body)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_and_clipping(fused: bool, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
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
            found.append([*(norm for norm in norms if norm.isfinite()), *values_of(model), *state_of(optimizer)])
        assert same(*found)

    run_ranks(2, body)


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
