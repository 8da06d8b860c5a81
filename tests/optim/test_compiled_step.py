"""`torch.compile(optimizer.step)` over chunks, parts and whole parameters: as over the parameters of the unsharded model."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.param_groups import Options, matrices_whole, plain_groups
from tests.support.processes import Rank, on_ranks
from tests.support.training import loss_of, odd_model, sentences

WAYS: dict[str, Options] = {
    "chunks": lambda name, info: {},
    "parts and whole parameters": matrices_whole,
}


def trained(model: nn.Module, groups: Any, rank: int, world_size: int) -> None:
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")  # captured; what code is made of it is the compiler's business
    for number in range(4):
        loss_of(model, sentences(number)[rank::world_size]).backward()
        step()
        optimizer.zero_grad()


def both(rank: Rank, way: str) -> float:
    """The largest difference of an element, sharded and not, after some compiled steps (which count in fp32, unlike others)."""
    warnings.simplefilter("ignore")  # the compiler has its own
    model = zero3.Zero3Sequential([zero3.Zero3Layer(module) for module in odd_model(torch.float64, rank.number)])
    plain = nn.Sequential(*odd_model(torch.float64))
    groups = zero3.param_groups(model, WAYS[way]) if way != "chunks" else model.get_trainable_chunk()
    trained(model, groups, rank.number, rank.world_size)
    trained(plain, plain_groups(plain, WAYS[way]), 0, 1)
    found = zero3.full_state_dict(model, rank0_only=False)
    return max((found[name] - value).abs().max().item() for name, value in plain.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_step_is_the_same_step(way: str) -> None:
    assert max(on_ranks(2, both, way)) < 1e-9
