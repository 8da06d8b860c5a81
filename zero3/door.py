"""A door in front of a model: who stands there hears of each use of it, and finishes what was begun
before, or refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from .access import states_of, used
from .core.autograd import inside_backward
from .core.collectives import Collective, Conductor
from .core.layer_state import LayerState
from .guards.optimizer_steps import steps_seen
from .layer import runtimes_in

__all__: list[str] = []

Ask = Callable[[Collective], None]


class Doorkeeper:
    """Asks before anything is done together."""

    def __init__(self, ask: Ask, inner: Conductor) -> None:
        self._ask, self.inner = ask, inner

    def conduct(self, what: Collective, *, absent: bool = False) -> Any:
        self._ask(what)
        return self.inner.conduct(what, absent=absent)


class Door:
    """In front of layers, until it is opened: forwards and backwards, optimizers' steps, and
    functions that use the model.
    """

    def __init__(self, states: Sequence[LayerState], ask: Ask) -> None:
        """`ask`: it raises, or what was to be done goes on. The layers hold it."""
        self._keepers = [(state, Doorkeeper(ask, state.conductor)) for state in states]
        for state, keeper in self._keepers:
            state.conducted_by(keeper)
        steps_seen().listen(self)

    def open(self) -> None:
        if self._keepers:
            steps_seen().forget(self)
        for state, keeper in self._keepers:
            state.no_longer_by(keeper)
        self._keepers = []


def used_between(model: nn.Module, by: str) -> list[LayerState]:
    """As `used`, for a function that is called between forwards and backwards.

    Raises:
        RuntimeError: It is called inside one of them.
    """
    states_of(model)
    if inside_backward() or any(runtime.in_forward for runtime in runtimes_in(model)):
        raise RuntimeError(f"zero3.{by} inside a forward or a backward: call it between them")
    return used(model, by)
