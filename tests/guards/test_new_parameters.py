"""What is put into a model after it was sharded: parameters that nobody shards, reduces or saves are refused, whichever way they come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import zero3
from tests.support.models import WORLDS
from tests.support.ranks import run_ranks
from tests.support.reference import Turn, by_shard, check_parity
from tests.support.stacks import WIDTH, Block, Stack, built, stack, train, train_and_look

REFUSED: dict[str, Callable[[Stack], Any]] = {
    "a module of the root": lambda m: setattr(m, "score", nn.Linear(2, 2)),
    "a module in a layer": lambda m: setattr(m.blocks[1].module, "extra", nn.Linear(2, 2)),
    "a module that replaces one": lambda m: setattr(m.blocks[1].module, "up", nn.Linear(WIDTH, 8)),
    "a module of a layer's wrapper": lambda m: setattr(m.blocks[1], "extra", nn.Linear(2, 2)),
    "a parameter of a layer's wrapper": lambda m: setattr(m.blocks[1], "extra", nn.Parameter(torch.ones(2))),
    "add_module": lambda m: m.blocks[0].up.add_module("lora", nn.Linear(2, 2)),
    "a block more": lambda m: m.blocks.append(Block()),
    "a parameter of the root": lambda m: setattr(m, "prompt", nn.Parameter(torch.ones(2))),
    "a parameter in a layer": lambda m: m.blocks[2].up.register_parameter("scale", nn.Parameter(torch.ones(2))),
    "a module deep inside": lambda m: setattr(m.norm, "extra", nn.Sequential(nn.Tanh(), nn.ModuleDict({"a": nn.Linear(2, 2)}))),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("inside", ["", "full_params", "resident"])
def test_new_parameters_are_refused(name: str, inside: str) -> None:
    model = zero3.shard(stack())
    names = [key for key, _ in model.named_modules()]
    context = getattr(zero3, inside)(model) if inside else contextlib.nullcontext()
    with pytest.raises(RuntimeError, match=r"belongs to a sharded model, and was to get parameters that are not: .*is sharded"), context:
        REFUSED[name](model)
    assert [key for key, _ in model.named_modules()] == names
    train(model, Turn(0, 0, 1))


def test_what_has_no_parameters_of_its_own_may_come() -> None:
    model = zero3.shard(stack())
    model.extra = nn.Dropout(0.0)
    model.blocks[1].module.note = nn.Module()
    model.blocks[1].up.register_parameter("none", None)
    model.norm.statistics = nn.BatchNorm1d(2, affine=False)  # buffers
    model.head_again = model.head  # a layer
    holder = nn.Module()
    holder.model = model
    train(model, Turn(0, 0, 1))


def test_modules_that_are_not_sharded_are_nobodys_business() -> None:
    zero3.shard(stack())
    other = stack()
    other.score = nn.Linear(2, 2)
    other.norm.extra = nn.Parameter(torch.ones(2))


class Adapted(Block):
    """As peft adapts fused experts: a parametrization is registered for each forward, and removed after it."""

    writes = 0.0

    def __init__(self, hidden: int = 7) -> None:
        super().__init__(hidden)
        self.factor = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.up, "weight", _Plus(self.factor * self.up.weight.tanh()))
        try:
            y = super().forward(x)
        finally:
            parametrize.remove_parametrizations(self.up, "weight", leave_parametrized=False)
        if self.writes:
            with torch.no_grad():
                self.down.weight.add_(self.writes)
        return y


class _Plus(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


def adapted() -> Stack:
    return built(lambda: Stack(Adapted(7), Adapted(8)))


@WORLDS
@pytest.mark.parametrize("stage", [3, 2, 1])
def test_a_parametrization_registered_in_each_forward_is_no_write(world_size: int, stage: int) -> None:
    check_parity(adapted, train_and_look, world_size=world_size, shard=by_shard, policy=zero3.ShardingPolicy(stage=stage))


def test_a_write_beside_a_parametrization_is_one_still() -> None:
    models = [adapted() for _ in range(2)]
    for model in models:
        model.blocks[1].writes = 0.1

    def body(group: Any) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        with pytest.raises(RuntimeError, match=r"layer 'blocks.1' \(Adapted\) computed, parameter 'down.weight' was changed in place"):
            train(model, Turn(0, 0, 1))

    run_ranks(2, body)


def test_set_to_other_values_is_a_write() -> None:
    class Setting(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.set_(self.up.weight.clone())
            return super().forward(x)

    models = [built(lambda: Stack(Setting(7))) for _ in range(2)]

    def body(group: Any) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        weight = model.blocks[0].up.weight
        for each in (weight, model.blocks[0].up.bias):
            with pytest.raises(RuntimeError, match="is released"):
                each.sum()
        for value in (weight, torch.ones(2).double()):  # torch itself asks no subclass whether it may
            with pytest.raises(RuntimeError, match=r"set_: 'up.weight' of layer 'blocks.0' \(Setting\) is released"), torch.no_grad():
                weight.set_(value)
        with pytest.raises(RuntimeError, match=r"'up\.weight' was changed in place"):
            train(model, Turn(0, 0, 1))

    run_ranks(2, body)


CONTAINERS: dict[str, Callable[[], nn.Module]] = {
    "ModuleList": lambda: nn.ModuleList([nn.Linear(2, 2)]),
    "ModuleDict": lambda: nn.ModuleDict({"a": nn.Linear(2, 2)}),
    "ParameterList": lambda: nn.ParameterList([nn.Parameter(torch.ones(2))]),
    "ParameterDict": lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_module_that_is_never_called_is_no_layer(name: str) -> None:
    """Zero3Layer(nn.ModuleList(...)) could never be fetched."""
    module = CONTAINERS[name]()
    before = list(module.parameters())
    with pytest.raises(ValueError, match=rf"a {name} is never called, so it can't be a layer.*each element by itself"):
        zero3.Zero3Layer(module)
    assert all(a is b and type(a) is nn.Parameter for a, b in zip(module.parameters(), before, strict=True))


def test_a_list_that_is_called_is_a_layer() -> None:
    class Called(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for module in self:
                x = module(x)
            return x

    layer = zero3.Zero3Layer(Called([nn.Linear(2, 2), nn.Linear(2, 2)]))
    layer(torch.ones(1, 2)).sum().backward()
