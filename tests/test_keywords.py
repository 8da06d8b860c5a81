"""A model's keywords are its own: no name that zero3 uses inside can take one of them."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from zero3 import ShardingPolicy

FUNCTIONS = [
    node.args
    for path in Path(zero3.__file__).parent.rglob("*.py")
    for node in ast.walk(ast.parse(path.read_text()))
    if isinstance(node, ast.FunctionDef | ast.Lambda)
]
PARAMETERS = (each for found in FUNCTIONS for each in (*found.posonlyargs, *found.args, *found.kwonlyargs, found.vararg, found.kwarg))
NAMES = sorted({each.arg for each in PARAMETERS if each is not None} - {"self"})  # of all parameters of all functions in zero3


class Block(nn.Module):
    """Adds up all that it is given, under any names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, /, **more: Any) -> Tensor:
        return self.linear(x) + sum(more.values())

    def encode(self, x: Tensor, /, **more: Any) -> Tensor:
        return self(x, **more) + self.linear(x)


class Net(nn.Module):
    def __init__(self, again: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.own = nn.Parameter(torch.ones(4))
        self.again = again

    def forward(self, x: Tensor, /, **more: Any) -> Tensor:
        for block in self.blocks:
            if self.again:
                x = checkpoint(lambda y, block=block: block(y, **more), x, use_reentrant=self.again == "reentrant")
            else:
                x = block(x, **more)
        return x * self.own

    def encode(self, x: Tensor, /, **more: Any) -> Tensor:
        for block in self.blocks:
            x = block.encode(x, **more)
        return x * self.own


def trains(model: Any, /, *given: Any, **more: Any) -> Tensor:
    found = model(*given, **more)
    found.sum().backward()
    return found


def evaluates(model: Any, /, *given: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(*given, **more)


def is_resident(model: Any, /, *given: Any, **more: Any) -> Tensor:
    with zero3.resident(model):
        torch.func.grad(lambda x: model(x, *given[1:], **more).sum())(given[0])
        return evaluates(model, *given, **more)


def is_guarded(model: Any, /, *given: Any, **more: Any) -> Tensor:
    with zero3.step_guard(model):
        return trains(model, *given, **more)


def is_profiled(model: Any, /, *given: Any, **more: Any) -> Tensor:
    with zero3.profile(model):
        return trains(model, *given, **more)


def encodes(model: Any, /, *given: Any, **more: Any) -> Tensor:
    for module in (model, *model.blocks):
        zero3.register_forward_method(module, "encode")
    found = model.encode(*given, **more)
    found.sum().backward()
    return found


WAYS: dict[str, tuple[Callable[..., Tensor], ShardingPolicy, str]] = {
    "training": (trains, ShardingPolicy(), ""),
    "evaluation": (evaluates, ShardingPolicy(), ""),
    "param_dtype": (trains, ShardingPolicy(param_dtype=torch.float32, cast_forward_inputs=True), ""),
    "output_dtype": (trains, ShardingPolicy(output_dtype=torch.float32), ""),
    "dynamic": (trains, ShardingPolicy(dynamic=True), ""),
    "stage": (trains, ShardingPolicy(stage=1), ""),
    "resident": (is_resident, ShardingPolicy(), ""),
    "step_guard": (is_guarded, ShardingPolicy(transactional=True), ""),
    "profile": (is_profiled, ShardingPolicy(), ""),
    "register_forward_method": (encodes, ShardingPolicy(output_dtype=torch.float32), ""),
    "reentrant checkpoint": (trains, ShardingPolicy(), "reentrant"),
    "checkpoint": (trains, ShardingPolicy(), "other"),
}


@pytest.mark.parametrize("way", WAYS)
def test_forward_takes_keywords_of_any_name(way: str) -> None:
    call, policy, again = WAYS[way]
    plain = Net(again)
    x, more = torch.ones(2, 4, requires_grad=True), {name: torch.full((4,), float(number)) for number, name in enumerate(NAMES)}
    expected = plain.encode(x, **more) if call is encodes else plain(x, **more)
    assert {"inputs", "output", "module", "state", "layer", "method_name", "args", "kwargs"} <= set(NAMES)
    assert torch.equal(call(zero3.shard(copy.deepcopy(plain), policy=policy), x, **more), expected)


def test_check_takes_a_batch_with_keywords_of_any_name() -> None:
    class Named(Net):
        def forward(self, **more: Any) -> Tensor:  # type: ignore[override]
            return super().forward(more["inputs"], **more)

    assert zero3.check(Named(), {name: torch.ones(2, 4) for name in NAMES}).first is None
