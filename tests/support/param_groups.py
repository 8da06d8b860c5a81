"""Options by parameter, and a model of odd parameters that trains with them: sharded, and in plain torch, which is the judge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import RANKS
from tests.support.ranks import ThreadCommunicator
from tests.support.training import loss_of, odd_model, sentences
from zero3 import ParamInfo

WORLDS = pytest.mark.parametrize("world_size", [*RANKS, pytest.param(4, marks=pytest.mark.slow)])
TOLERANCE = 1e-12

Options = Callable[[str, ParamInfo], dict[str, Any] | None]


def build(seed: int = 0) -> list[nn.Module]:
    """An embedding, blocks and a readout with something odd each: a tied, an empty, a frozen parameter."""
    modules = odd_model(torch.float64, seed)
    modules[1].again = modules[1].norm
    modules[2].register_parameter("empty", nn.Parameter(torch.empty(3, 0, dtype=torch.float64)))
    modules[3].up.bias.requires_grad_(False)
    return modules


def as_layers(group: ThreadCommunicator, modules: list[nn.Module] | None = None, **policy: Any) -> zero3.Zero3Sequential:
    process_group, chosen = group if group.world_size > 1 else None, zero3.ShardingPolicy(**policy)
    made = modules or build(group.rank)
    return zero3.Zero3Sequential([zero3.Zero3Layer(module, process_group=process_group, policy=chosen) for module in made])


def info_of(name: str, p: Tensor) -> ParamInfo:
    return ParamInfo(name, tuple(p.shape), p.numel(), p.dtype, p.ndim)


def plain_groups(model: nn.Module, options: Options) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = []
    for name, p in model.named_parameters():
        answer = options(name, info_of(name, p)) if p.requires_grad else None
        if answer is None:
            continue
        same = next((group for group in groups if {k: v for k, v in group.items() if k != "params"} == answer), None)
        if same is None:
            groups.append(same := {**answer, "params": []})
        same["params"].append(p)
    return groups


def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.3, momentum=0.9)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, world_size: int, numbers: range = range(4)) -> list[float]:
    losses = []
    for step in numbers:
        loss = loss_of(model, sentences(step)[rank::world_size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run_plain(*programs: Options) -> tuple[list[float], dict[str, Tensor]]:
    model, losses = nn.Sequential(*build()), []
    for turn, options in enumerate(programs):
        losses += steps(model, make(plain_groups(model, options)), 0, 1, range(4 * turn, 4 * turn + 4))
        model.zero_grad()  # also of what no optimizer holds
    return losses, model.state_dict()


def mean(losses: list[list[float]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*losses, strict=True)]


def assert_same(found: list[tuple[list[float], dict[str, Tensor]]], expected: tuple[list[float], dict[str, Tensor]]) -> None:
    assert mean([losses for losses, _ in found]) == pytest.approx(expected[0], rel=1e-9)
    for _, state in found:
        assert state.keys() == expected[1].keys()
        for name, value in expected[1].items():
            assert torch.allclose(state[name], value, rtol=0, atol=TOLERANCE), name


def by_name(name: str, info: ParamInfo) -> dict[str, Any] | None:
    assert info.name == name and info.numel == torch.Size(info.shape).numel() and info.ndim == len(info.shape)
    if "norm" in name:
        return None
    return {"weight_decay": 0.1 if info.ndim > 1 else 0.0, "lr": 0.1 if "bias" in name else 0.3}


def matrices_whole(name: str, info: ParamInfo) -> dict[str, Any]:
    return {"whole": True, "lr": 0.1, "kind": "a"} if info.ndim == 2 else {"kind": "b"}


def all_whole(name: str, info: ParamInfo) -> dict[str, Any]:
    return {"whole": True}
