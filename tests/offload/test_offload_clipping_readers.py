"""Whoever reads or writes gradients around clipping finds them as without files: by torch, numpy, names, views, autograd or memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.offload.test_offload_clipping import gradients, prepared, untouched
from tests.support.models import WORLDS, mlp, step
from tests.support.offloaded import MAKES, groups_of, same_bits, state_of, trained, values_of, wrapped
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn

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
    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model, optimizer = prepared(group, place)
        held = gradients(model)
        assert place is None or all(untouched(model))
        zero3.clip_grad_norm_(model, 0.1)
        assert place is None or all(untouched(model))
        seen = READS[way](model)
        assert not any(untouched(model)) or way == "zeros"
        optimizer.step()
        return [*seen, *(each.as_subclass(Tensor) for each in held), *values_of(model), *state_of(optimizer)]

    same_bits(world_size, run, tmp_path)


@pytest.mark.parametrize("how", ["chunks", "groups", "whole"])
def test_one_that_was_read_leaves_the_others_to_be_scaled(how: str, tmp_path: Path) -> None:
    """Gradients have several classes by then, and torch asks one of them about an operation on all."""

    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model = wrapped(group, place, mlp())
        optimizer = zero3.offload_optimizer(MAKES["sgd"](groups_of(model, how)))
        for number in range(2):
            optimizer.zero_grad()
            step(model, Turn(group.rank, number, group.world_size))
            zero3.clip_grad_norm_(model, 1e-3)
        own = [parameter.grad for each in optimizer.param_groups for parameter in each["params"] if parameter.numel()]
        assert place is None or all(type(gradient).__name__ == "UntouchedGradient" for gradient in own)
        seen = [own[0].sum(), *torch._foreach_mul(own, 2.0)]
        torch._foreach_mul_(own, 3.0)
        optimizer.step()
        return [*(each.as_subclass(Tensor) for each in seen), *values_of(model)]

    same_bits(2, run, tmp_path)


@pytest.mark.parametrize("how", ["chunks", "groups", "whole"])
def test_torchs_own_clipping_is_refused_of_gradients_that_nobody_has_asked(how: str, tmp_path: Path) -> None:
    """As of those that are in memory. Of whole parameters one norm is right, and a total over those of one rank is not."""

    def body(group: ThreadCommunicator) -> None:
        model = wrapped(group, tmp_path, mlp())
        optimizer = zero3.offload_optimizer(MAKES["sgd"](groups_of(model, how)))
        for number in range(2):
            optimizer.zero_grad()
            step(model, Turn(group.rank, number, group.world_size))
            if number == 0:
                zero3.clip_grad_norm_(model, 0.1)
        own = [parameter for each in optimizer.param_groups for parameter in each["params"] if parameter.numel()]
        assert all(type(parameter.grad).__name__ == "UntouchedGradient" for parameter in own)
        with pytest.raises(RuntimeError, match=r"use zero3\.clip_grad_norm_"):
            nn.utils.clip_grad_norm_(own, 0.1)
        assert how != "whole" or own[0].grad.norm() > 0

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


def edit_view_of_an_earlier_micro_batch(model: nn.Module) -> None:
    views = [gradient.data for gradient in gradients(model)]
    step(model, Turn(0, 7, 1))
    for view in views:
        view.mul_(3)


EDITS = [edit_by_numpy, edit_by_name, edit_data, replace_one, penalise, unscale, edit_view_of_an_earlier_micro_batch]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@WORLDS
def test_whoever_edits_a_gradient_before_clipping_changes_the_norm(world_size: int, edit: Any, tmp_path: Path) -> None:
    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model, optimizer = prepared(group, place)
        edit(model)
        norm = zero3.clip_grad_norm_(model, 0.1)
        optimizer.step()
        return [norm, *values_of(model), *state_of(optimizer)]

    same_bits(world_size, run, tmp_path)


@pytest.mark.parametrize("way", ["data", "numpy", "by name"])
def test_a_view_that_is_held_since_before_clipping_shows_the_scaled_gradient(way: str, tmp_path: Path) -> None:
    views: dict[str, Callable[[nn.Module], list[Any]]] = {
        "data": lambda model: [gradient.data for gradient in gradients(model)],
        "numpy": lambda model: [gradient.numpy() for gradient in gradients(model)],
        "by name": lambda model: list(zero3.named_gradients(model).values()),
    }

    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model, _ = prepared(group, place)
        held = views[way](model)
        zero3.clip_grad_norm_(model, 0.1)
        return [torch.as_tensor(each).clone() for each in held]

    same_bits(2, run, tmp_path)


@pytest.mark.parametrize("policy", [{}, {"stage": 1}], ids=str)
@WORLDS
def test_a_penalty_may_be_added_after_clipping(world_size: int, policy: dict[str, Any], tmp_path: Path) -> None:
    """Autograd adds it to the gradients without asking anybody."""

    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
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
        return [*values_of(model), *state_of(optimizer)]

    same_bits(world_size, run, tmp_path)


class Unseen(torch.optim.SGD):
    """Reads gradients as an extension module would, without a function of torch that can be overridden."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(torch.Tensor._make_subclass(Tensor, parameter.grad), alpha=group["lr"])


def test_an_optimizer_that_reads_memory_reads_scaled_gradients(tmp_path: Path) -> None:
    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
        model = wrapped(group, place, mlp())
        optimizer = zero3.offload_optimizer(Unseen(zero3.get_trainable_chunk(model), lr=0.1))
        trained(model, optimizer, group)
        return values_of(model)

    same_bits(2, run, tmp_path)


@WORLDS
def test_gradients_whose_parameters_have_hooks_are_read(world_size: int, tmp_path: Path) -> None:
    def run(group: ThreadCommunicator, place: Path | None) -> list[Tensor]:
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
        return [*values_of(model), *state_of(optimizer)]

    same_bits(world_size, run, tmp_path)
