"""nan and inf are seen by all ranks alike, and runs repeat to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.support.models import WIDTH, mlp
from tests.support.processes import Rank
from tests.support.processes import on_ranks as on_processes
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import Turn, in_sequence, on_ranks, sgd
from zero3 import ShardingPolicy


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_clip_grad_norm_error_if_nonfinite_of_what_one_rank_computes(value: float) -> None:
    def body(model: Any, group: ThreadCommunicator) -> tuple[Any, ...]:
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        x[0, 0] = value if group.rank == 1 else 1.0
        model(x).pow(2).mean().backward()
        with pytest.raises(RuntimeError, match="can't be clipped"):
            zero3.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
        return zero3.clip_grad_norm_(model, 1.0).isfinite().item(), True

    assert on_ranks(3, mlp, body) == [(False, True)] * 3


def test_torchs_gradscaler_skips_the_step_on_all_ranks() -> None:
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
