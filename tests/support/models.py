"""Small models with something odd about them, in fp64 and the same at every call. Tests build, wrap and train them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5  # odd, so that slices cut through parameters and padding is needed
ONE_GENERATOR = threading.RLock()  # which ranks that are threads share: they make models one at a time
# One rank is a case of its own, and three cut unevenly: what is wrong on two is mostly wrong on three as well.
RANKS = [1, pytest.param(2, marks=pytest.mark.slow), 3]
WORLDS = pytest.mark.parametrize("world_size", RANKS)


def rows(count: int) -> Tensor:
    """Inputs of the models below, no two alike."""
    return torch.linspace(-1, 1, count * WIDTH, dtype=torch.float64).view(count, WIDTH)


def seeded(*makers: Callable[[], nn.Module], seed: int = 0) -> nn.Sequential:
    """The modules in sequence, as fp64, with the same values every time."""
    with ONE_GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(*(make() for make in makers)).double()


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def mlp(depth: int = 3) -> nn.Sequential:
    """`depth` layers of one linear map and a non-linearity each."""
    return seeded(*[lambda: nn.Sequential(linear(), nn.Tanh())] * depth)


def mean_square(model: Callable[..., Any], turn: Any) -> tuple[Tensor, Tensor | None]:
    """A program: a forward and a backward, to the inputs too."""
    x = turn.tensor(3, WIDTH, requires_grad=True)
    loss = model(x * 1).pow(2).mean()
    loss.backward()
    return loss, x.grad


class Broken(Exception):
    pass


class Fuse(torch.autograd.Function):
    """Hands its input on, unless `module.blows` says in which phase to fail, and with what: `("backward", Broken)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        _blow(module, "forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        _blow(ctx.module, "backward")
        return gradient, None


def _blow(module: nn.Module, phase: str) -> None:
    if module.blows is not None and module.blows[0] == phase:
        raise module.blows[1]("the fuse")


def fused() -> nn.Sequential:
    """Three layers with a fuse each."""
    model = seeded(*[calls(lambda m, x: m.b(Fuse.apply(m.a(x), m)).tanh())] * 3)
    for module in model:
        module.blows = None
    return model


def step(model: nn.Module, turn: Any) -> Tensor:
    """A program: the mean square of the outputs, and its gradients."""
    loss: Tensor = model(turn.tensor(3, WIDTH)).pow(2).mean()
    loss.backward()
    return loss


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


class Checkpointed(nn.Module):
    """Computes the module inside anew in backward."""

    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.use_reentrant)
