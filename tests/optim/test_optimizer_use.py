"""Optimizers as users handle them, over chunks, parts and whole parameters: as plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import zero3
from tests.checkpoint.test_param_groups import by_decay, plain_groups, whole
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group

STEPS = 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.norm = nn.LayerNorm(5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.norm(x)


def net() -> Net:
    """The same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().double()


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    return (model(x) - y).pow(2).mean()


WAYS: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any]]] = {
    "chunks": (zero3.get_trainable_chunk, lambda model: list(model.parameters())),
    "parts": (lambda model: zero3.param_groups(model, by_decay), plain_groups),
    "whole": (lambda model: zero3.param_groups(model, whole), plain_groups),
}

Use = Callable[[nn.Module, Any], None]  # model, and what its optimizer is to be made of


def held_by(optimizer: optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def steps(
    make: Callable[[Any], optim.Optimizer], *, to_none: bool = True, before: Any = None, schedule: Callable[[Any], Any] | None = None
) -> Use:
    def use(model: nn.Module, params: Any) -> None:
        optimizer = make(params)
        following = schedule(optimizer) if schedule is not None else None
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=to_none)
            loss = loss_of(model, step)
            loss.backward()
            if before is not None:
                before(held_by(optimizer))
            optimizer.step()
            if isinstance(following, schedulers.ReduceLROnPlateau):
                following.step(loss.item())
            elif following is not None:
                following.step()

    return use


def closures(model: nn.Module, params: Any) -> None:
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.item()

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses == sorted(losses, reverse=True)  # type: ignore[type-var]


def averaged(model: nn.Module, params: Any) -> None:
    optimizer = optim.SGD(params, lr=0.1)
    kept = [p.detach().clone() for p in held_by(optimizer)]
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        torch._foreach_lerp_(kept, [p.detach() for p in held_by(optimizer)], 0.1)
    with torch.no_grad():
        for parameter, value in zip(held_by(optimizer), kept, strict=True):
            parameter.copy_(value)


def scaled(model: nn.Module, params: Any) -> None:
    """The third loss is infinite."""
    ours = any(getattr(p, "zero3_state", None) is not None for p in model.parameters())
    scaler = (zero3.GradScaler if ours else torch.amp.GradScaler)("cpu", init_scale=8.0)
    optimizer = optim.AdamW(params, lr=0.1, fused=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step) * (math.inf if step == 2 else 1.0)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            zero3.clip_grad_norm_(model, 0.1) if ours else nn.utils.clip_grad_norm_(held_by(optimizer), 0.1)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0


def reloaded(model: nn.Module, params: Any) -> None:
    """Its own state dict, at the same number of ranks."""
    optimizer = optim.AdamW(params, lr=0.05)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        state = deepcopy(optimizer.state_dict())
        optimizer.state.clear()
        optimizer.load_state_dict(state)


def sgd(params: Any) -> optim.Optimizer:
    return optim.SGD(params, lr=0.1, momentum=0.9)


USES: dict[str, Use] = {
    "zeros instead of None": steps(lambda p: optim.AdamW(p, lr=0.05), to_none=False),
    "foreach": steps(lambda p: optim.AdamW(p, lr=0.05, foreach=True)),
    "one by one": steps(lambda p: optim.AdamW(p, lr=0.05, foreach=False)),
    "fused": steps(lambda p: optim.AdamW(p, lr=0.05, fused=True)),
    "fused SGD": steps(lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True), to_none=False),
    "fused Adagrad": steps(lambda p: optim.Adagrad(p, lr=0.05, fused=True)),
    "maximize": steps(lambda p: optim.AdamW(p, lr=0.05, maximize=True)),
    "a rate in a tensor": steps(lambda p: optim.AdamW(p, lr=torch.tensor(0.05, dtype=torch.float64), foreach=False)),
    "amsgrad": steps(lambda p: optim.Adam(p, lr=0.05, amsgrad=True)),
    "clipped by value": steps(sgd, before=lambda ps: nn.utils.clip_grad_value_(ps, 1e-2)),
    "clipped by value, foreach": steps(sgd, before=lambda ps: nn.utils.clip_grad_value_(ps, 1e-2, foreach=True), to_none=False),
    "gradients replaced": steps(sgd, before=lambda ps: [setattr(p, "grad", p.grad * 0.5) for p in ps if p.grad is not None]),
    "closures": closures,
    "averaged": averaged,
    "scaled": scaled,
    "reloaded": reloaded,
}

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=2),
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 4),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 4),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.001, 0.1, step_size_up=2),  # moves the momentum too
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "SequentialLR": lambda o: schedulers.SequentialLR(o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.5)], [2]),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler([schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.5)]),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=3),
}
ALL = {**USES, **{name: steps(sgd, schedule=schedule) for name, schedule in SCHEDULES.items()}}


def test_the_schedules_are_all_of_torch() -> None:
    bases = {"LRScheduler", "_LRScheduler"}
    theirs = {n for n, kind in vars(schedulers).items() if isinstance(kind, type) and issubclass(kind, schedulers.LRScheduler)}
    assert set(SCHEDULES) == (theirs - bases) | {"SWALR"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ALL)
def test_as_plain_torch(name: str, way: str) -> None:
    use, (ours, theirs) = ALL[name], WAYS[way]
    reference = net()
    use(reference, theirs(reference))

    def body(group: ThreadCommunicator) -> Any:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        use(model, ours(model))
        return zero3.full_state_dict(model, rank0_only=False)

    models = [net() for _ in range(2)]
    before, expected = net().state_dict(), reference.state_dict()
    moved = max((before[key] - value).abs().max().item() for key, value in expected.items())
    for found in run_ranks(2, body):
        off = max((found[key] - value).abs().max().item() for key, value in expected.items())
        assert moved > 1e-4 and off < 1e-10 * moved, (off, moved)


def test_a_rank_that_holds_nothing_keeps_step() -> None:
    """One bias of five elements is trained, which lies on the last rank or two."""

    def use(model: nn.Module, params: Any) -> float:
        ours = any(getattr(p, "zero3_state", None) is not None for p in model.parameters())
        scaler = (zero3.GradScaler if ours else torch.amp.GradScaler)("cpu", init_scale=8.0)
        optimizer = optim.AdamW(params, lr=0.05)
        if ours:
            zero3.check_optimizer(model, optimizer)
        norm = torch.zeros(())
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizer)
            norm = zero3.clip_grad_norm_(model, 0.01) if ours else nn.utils.clip_grad_norm_(held_by(optimizer), 0.01)
            scaler.step(optimizer)
            scaler.update()
        return norm.item()

    def body(group: ThreadCommunicator) -> Any:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        norm = use(model, zero3.param_groups(model, lambda name, info: {} if name == "blocks.0.bias" else None))
        return norm, zero3.full_state_dict(model, rank0_only=False)

    models = [net() for _ in range(3)]
    reference = net()
    expected = use(reference, [reference.blocks[0].bias])
    for norm, found in run_ranks(3, body):
        assert norm == pytest.approx(expected, rel=1e-12)
        for name, value in reference.state_dict().items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name
