"""nan and inf are seen by all ranks alike, runs repeat to the bit, and `check` finds what differs from plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WIDTH, mlp
from tests.support.processes import Rank
from tests.support.processes import on_ranks as on_processes
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, in_sequence, on_ranks, process_group, sgd
from zero3 import ShardingPolicy
from zero3.core.gradient_reducer import GradientReducer


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_one_rank_computes_all_ranks_see(value: float) -> None:
    def body(model: Any, group: ThreadCommunicator) -> tuple[Any, ...]:
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        x[0, 0] = value if group.rank == 1 else 1.0
        model(x).pow(2).mean().backward()
        with pytest.raises(RuntimeError, match="can't be clipped"):
            zero3.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        return zero3.clip_grad_norm_(model, 1.0).isfinite().item(), True

    assert on_ranks(3, mlp, body) == [(False, True)] * 3


def test_torchs_scaler_skips_the_step_on_all_ranks() -> None:
    def body(model: Any, group: ThreadCommunicator) -> tuple[float, bool]:
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), sgd(model.get_trainable_chunk())
        before = [chunk.clone() for chunk in model.get_trainable_chunk()]
        x = torch.full((2, WIDTH), float("inf") if group.rank == 1 else 1.0)
        scaler.scale(model(x).pow(2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(before, model.get_trainable_chunk(), strict=True))
        return scaler.get_scale(), same

    assert on_ranks(2, lambda: mlp().float(), body) == [(512.0, True)] * 2


def train(rank: Rank, deterministic: bool, policy: ShardingPolicy) -> list[Tensor]:
    """`use_deterministic_algorithms` fills new memory with nan, too."""
    torch.use_deterministic_algorithms(deterministic)
    try:
        model = in_sequence(mlp(), None, policy)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01)
        for step in range(5):
            for number in (step, step + 10):
                model(Turn(rank.number, number, 3).tensor(4, WIDTH)).pow(2).mean().backward()
            zero3.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [chunk.detach().clone() for chunk in zero3.get_trainable_chunk(model)]
    finally:
        torch.use_deterministic_algorithms(False)


def test_runs_repeat_to_the_bit() -> None:
    deep, staged = ShardingPolicy(prefetch_depth=2), ShardingPolicy(prefetch_depth=0, transactional=True)
    first, *others = (on_processes(3, train, *how) for how in ((False, deep), (False, deep), (True, deep), (False, staged)))
    for other in others:
        assert all(torch.equal(a, b) for mine, theirs in zip(first, other, strict=True) for a, b in zip(mine, theirs, strict=True))


# -- check


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(mlp())
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.norm(x)


def checked(group: ThreadCommunicator, model: nn.Module, **options: Any) -> zero3.check.CheckReport:  # type: ignore[name-defined]
    batch = Turn(group.rank, 0, group.world_size).tensor(4, WIDTH)
    return zero3.check(model, batch, process_group=process_group(group), **options)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_check_agrees_and_changes_nothing(world_size: int, reduction: Any) -> None:
    torch.manual_seed(0)
    model = mlp() if world_size > 1 else Small()  # dropout draws from one generator for all threads
    before = {name: value.clone() for name, value in model.state_dict().items()}
    policy = ShardingPolicy(gradient_reduction=reduction)
    wrap = (lambda g: lambda m: in_sequence(m, process_group(g), policy)) if world_size > 1 else lambda g: None
    for report in run_ranks(world_size, lambda group: checked(group, model, policy=policy, wrap=wrap(group))):
        assert report.first is None
        assert report.compared == 1 + 2 * len(list(model.parameters()))
        assert report.worst < 1e-9
        assert "agree" in str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_check_names_the_first_parameter_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GradientReducer.add

    def add(self: GradientReducer, index: int, gradient: Tensor) -> None:
        slot = self._chunk.layout.slots[index]
        real(self, index, gradient * 2 if slot.name.endswith("bias") else gradient)

    monkeypatch.setattr(GradientReducer, "add", add)
    model = mlp()
    reports = run_ranks(2, lambda g: checked(g, model, wrap=lambda m: in_sequence(m, process_group(g), ShardingPolicy())))
    for report in reports:
        assert report.first == "0.0.bias"
        assert {difference.name for difference in report.differences} == {"0.0.bias", "1.0.bias", "2.0.bias"}
        assert "differ in 6 of 13" in str(report) and "gradient 0.0.bias: off by" in str(report)
