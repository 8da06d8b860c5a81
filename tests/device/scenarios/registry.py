"""All scenarios by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn

from tests.device.training import Me, train

Scenario = Callable[[Me], Iterable[Tensor]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def add(name: str, make: Callable[[Me], nn.Module]) -> None:
    """Training as usual is the scenario; the model is what differs."""
    SCENARIOS[name] = lambda me: train(make(me), me)
