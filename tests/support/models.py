"""Small models with something odd about them, in fp64 and the same at every call. Tests build, wrap and train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 5  # odd, so that slices cut through parameters and padding is needed


def seeded(*makers: Callable[[], nn.Module], seed: int = 0) -> nn.Sequential:
    """The modules in sequence, as fp64, with the same values every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(make() for make in makers)).double()


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def mlp(depth: int = 3) -> nn.Sequential:
    """`depth` layers of one linear map and a non-linearity each."""
    return seeded(*[lambda: nn.Sequential(linear(), nn.Tanh())] * depth)


class Calls(nn.Module):
    """A module that is what `function(module, *args)` says, with linear maps `a` and `b` to say it with."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def calls(function: Callable[..., Any]) -> Callable[[], nn.Module]:
    return lambda: Calls(function)


class Weights(nn.Module):
    """Bare parameters, and a function of them and the input."""

    def __init__(self, function: Callable[..., Tensor], **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            self.register_parameter(
                name, nn.Parameter(value.clone(memory_format=torch.preserve_format), requires_grad=value.is_floating_point())
            )
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)
