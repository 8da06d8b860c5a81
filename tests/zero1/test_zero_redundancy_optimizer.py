"""The optimizer whose state is spread over the ranks, against the optimizer it stands for. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
}
FUSED = (torch.optim.AdamW, {"lr": 0.01, "fused": True})

optimizers = pytest.mark.parametrize("name", OPTIMIZERS)


def odd_parameters(seed: int = 0) -> list[nn.Parameter]:
    """Shapes that W does not divide, one larger than a message's worth, several dtypes, some transposed, one without elements."""
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> Tensor:
        return torch.randn(torch.Size(shape), generator=generator)

    values = [made(5, 7), made(3), made(257, 257), made(), made(0, 4), made(6, 4).t(), made(11).double(), made(2, 2).double()]
    values += [made(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), made(9).bfloat16(), torch.complex(made(5), made(5))]
    return [nn.Parameter(value) for value in values]


def give_gradients(parameters: list[nn.Parameter], step: int, missing: tuple[int, ...] = (), odd_layout: bool = False) -> None:
    """What DDP leaves: the same on every rank. `odd_layout`: one does not lie in memory as its parameter does."""
    generator = torch.Generator().manual_seed(1000 + step)
    for number, parameter in enumerate(parameters):
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if number != 8 or not odd_layout:
            gradient = torch.empty_like(parameter).copy_(gradient)
        parameter.grad = None if number in missing else gradient


def on_threads(world_size: int, body: Callable[[Any], Any]) -> list[Any]:
    def rank(group: ThreadCommunicator) -> Any:
        return body(group if world_size > 1 else None)

    return run_ranks(world_size, rank)


def values_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in parameters]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.shape == b.shape and a.dtype == b.dtype, number
        assert torch.equal(a, b), f"tensor {number} is off by {(a - b).abs().max()}"


def assert_same_state_dict(found: Any, expected: Any, where: str = "state dict") -> None:
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same_state_dict(found[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, value in enumerate(expected):
            assert_same_state_dict(found[number], value, f"{where}[{number}]")
    elif isinstance(expected, Tensor):
        assert found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(found, expected), where
    else:
        assert found == expected, where


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range, odd_layout: bool = False) -> list[Tensor]:
    for step in steps:
        give_gradients(parameters, step, (1,) if step == 1 else (), odd_layout)
        optimizer.step()
        optimizer.zero_grad()
    return values_of(parameters)


@optimizers
@WORLDS
@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket view"])
def test_zeroredundancyoptimizer_gives_the_bits_and_the_state_dict_of_the_plain_optimizer(name: str, world_size: int, view: bool) -> None:
    optimizer_class, options = OPTIMIZERS[name]
    plain_parameters = odd_parameters()
    plain = optimizer_class(plain_parameters, **options)
    expected = train(plain, plain_parameters, range(4), odd_layout=True)

    def body(group: Any) -> tuple[list[Tensor], Any]:
        parameters = odd_parameters()
        ours = zero3.ZeroRedundancyOptimizer(parameters, optimizer_class, group, view, **options)
        found = train(ours, parameters, range(4), odd_layout=True)
        last = world_size - 1
        ours.consolidate_state_dict(to=last)
        if ours.rank != last:
            with pytest.raises(RuntimeError, match=rf"consolidate_state_dict\(to={ours.rank}\) on all ranks"):
                ours.state_dict()
        return found, ours.state_dict() if ours.rank == last else None

    results = on_threads(world_size, body)
    for found, _ in results:
        assert_same_bits(found, expected)
    assert_same_state_dict(results[-1][1], plain.state_dict())


@WORLDS
def test_zeroredundancyoptimizer_of_a_fused_one_equals_the_plain_one_but_for_the_last_bit(world_size: int) -> None:
    """torch's kernel for the CPU rounds the last elements of a run otherwise. (And mixes up gradients in an odd layout.)"""
    optimizer_class, options = FUSED
    plain_parameters = odd_parameters()[:-1]  # it refuses complex ones
    expected = train(optimizer_class(plain_parameters, **options), plain_parameters, range(4))

    def body(group: Any) -> list[Tensor]:
        parameters = odd_parameters()[:-1]
        return train(zero3.ZeroRedundancyOptimizer(parameters, optimizer_class, group, **options), parameters, range(4))

    results = on_threads(world_size, body)
    for found in results:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        assert_same_bits(found, results[0])
