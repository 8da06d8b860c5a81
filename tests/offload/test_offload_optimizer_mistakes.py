"""Optimizers that `offload_optimizer` refuses, and what may not follow it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import zero3
from tests.support.models import WORLDS, mlp
from tests.support.offloaded import Make, backward, disk_is_full, same, small, values_of, wrapped
from tests.support.ranks import ThreadCommunicator, run_ranks


class SharedCount(torch.optim.SGD):
    """Its step size depends on how often `step` was called."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


class OverAll(torch.optim.Optimizer):
    """Takes the largest gradient of all parameters for its unit."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        unit = max(p.grad.abs().max() for p in parameters)
        for parameter in parameters:
            parameter.sub_(0.1 * parameter.grad / unit)


class Unmakeable(torch.optim.SGD):
    def __init__(self, parameters: Any, secret: object) -> None:
        super().__init__(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (torch.optim.LBFGS, "LBFGS can't be tried out.*closure"),
        (lambda parameters: SharedCount(parameters, lr=0.1), "SharedCount computes something from all parameters at once"),
        (OverAll, "OverAll computes something from all parameters at once"),
        (lambda parameters: Unmakeable(parameters, object()), "Unmakeable can't be tried out"),
    ],
)
def test_refuses_what_can_not_go_chunk_by_chunk(make: Make, says: str, tmp_path: Path) -> None:
    model = small(tmp_path)
    optimizer = make(zero3.get_trainable_chunk(model))
    with pytest.raises(ValueError, match=says):
        zero3.offload_optimizer(optimizer)
    assert "step" not in vars(optimizer)
    backward(model)
    if not isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step()  # it works without


def test_a_list_whose_last_member_is_refused_is_as_before(tmp_path: Path) -> None:
    model = small(tmp_path)
    groups = zero3.param_groups(model, lambda name, info: {"weight_decay": float(info.ndim > 1)})
    optimizer = zero3.OptimizerList(torch.optim.AdamW(groups[:1], lr=0.1), OverAll(groups[1:]))
    with pytest.raises(ValueError, match="OverAll computes something from all parameters at once"):
        zero3.offload_optimizer(optimizer)
    assert not any("step" in vars(member) for member in optimizer.members)
    assert not list(tmp_path.rglob("*state*"))
    backward(model)
    optimizer.step()


def test_refuses_what_is_no_optimizer_and_a_scheduler_before(tmp_path: Path) -> None:
    model = small(tmp_path)
    with pytest.raises(TypeError, match="found a list"):
        zero3.offload_optimizer([])  # type: ignore[type-var]
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    with pytest.raises(ValueError, match="make the scheduler with what it returns"):
        zero3.offload_optimizer(optimizer)


def test_set_trainable_and_param_groups_afterwards_raise(tmp_path: Path) -> None:
    model = small(tmp_path)
    optimizer = zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1))
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    zero3.param_groups(model, lambda name, info: {"weight_decay": float(info.ndim > 1)})
    backward(model)
    with pytest.raises(RuntimeError, match="param_groups"):
        optimizer.step()
    assert all(group["params"] for group in optimizer.param_groups)


@WORLDS
def test_a_full_disk_is_one_error_on_all_ranks(world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, unlucky = os.posix_fallocate, set[int]()

    def refuse(*given: int) -> None:
        disk_is_full() if threading.get_ident() in unlucky else allocate(*given)

    monkeypatch.setattr(os, "posix_fallocate", refuse)

    def body(group: ThreadCommunicator) -> str:
        model = wrapped(group, tmp_path, mlp())
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
        before = values_of(model)
        if group.rank == world_size - 1:
            unlucky.add(threading.get_ident())
        with pytest.raises(OSError, match=f"rank {world_size - 1}.*no room" if world_size > 1 else "no room") as caught:
            zero3.offload_optimizer(optimizer)
        assert "step" not in vars(optimizer) and same(values_of(model), before)
        return str(caught.value)

    assert len(set(run_ranks(world_size, body))) == 1
