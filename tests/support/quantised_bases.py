"""Models with a frozen base that is quantised, the plain ones that they are compared with, and how both train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.reference import Turn
from zero3 import MXFP4, NF4, Float8, Int8, ShardingPolicy

Kind = NF4 | Int8 | Float8 | MXFP4
FORMATS: list[Kind] = [NF4(), NF4(double_quant=False), Int8(), Float8(block=(8, 8)), MXFP4()]
WIDTH, INNER = 24, 40
formats = pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)


class Adapted(nn.Module):
    """A frozen block with adapters, as peft makes them: the base's modules are plain linear layers."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, dtype=dtype), nn.Linear(INNER, WIDTH, bias=False, dtype=dtype)
        self.requires_grad_(False)
        self.first, self.second = nn.Parameter(torch.randn(3, WIDTH, dtype=dtype) / 5), nn.Parameter(torch.randn(INNER, 3, dtype=dtype) / 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x) + x @ self.first.t() @ self.second.t()))


def seeded(make: Callable[[], nn.Module], kind: Kind, where: Callable[[str, Tensor], bool]) -> Callable[[], nn.Module]:
    """Builds the model with what `kind` makes of its weights. It keeps the weights themselves for `quantizing`."""

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = make()
        originals = {name: p.detach().clone() for name, p in model.named_parameters() if where(name, p)}
        for name, values in originals.items():
            model.get_parameter(name).data.copy_(kind.dequantize(kind.quantize(values), values.dtype))
        model.__dict__["originals"] = originals
        return model

    return build


def quantizing(shard: Any) -> Any:
    """Shards the model that `seeded` has built, with its weights as they were. Other ranks than 0 have others, which don't count."""

    def sharded(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
        if group is None or group.rank == 0:
            for name, values in model.__dict__["originals"].items():
                model.get_parameter(name).data.copy_(values)
        del model.__dict__["originals"]
        return shard(model, group, policy)

    return sharded


def quantised_names(model: nn.Module) -> list[str]:
    """The names of the parameters that are quantised, sorted. While layers compute, they have a class that says so."""
    with zero3.resident(model):
        return sorted(name for name, parameter in model.named_parameters() if type(parameter).__name__ == "QuantizedParameter")


def is_base(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1 and not parameter.requires_grad


def blocks(count: int = 3) -> nn.Module:
    return nn.Sequential(*[Adapted() for _ in range(count)])


def program(model: nn.Module, turn: Turn) -> Tensor:
    x = turn.tensor(2, 5, WIDTH, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    return torch.cat([loss.view(1), x.grad.flatten()])


def by_shard(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
    return zero3.shard(model, [type(child) for child in model.children()], policy=policy, process_group=group)


def plain_losses(build: Callable[[], nn.Module]) -> list[float]:
    model = build()
    return _losses(model, [p for p in model.parameters() if p.requires_grad])


def sharded_losses(model: nn.Module) -> list[float]:
    return _losses(model, zero3.get_trainable_chunk(model))


def _losses(model: nn.Module, parameters: list[nn.Parameter]) -> list[float]:
    optimizer, losses = torch.optim.SGD(parameters, lr=0.5), []
    dtype = next(p.dtype for p in parameters)
    for step in range(3):
        loss = model(Turn(0, step, 1).tensor(2, 5, WIDTH).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] != losses[-1]
    return losses
