"""One step of the local optimizer, which has only this rank's parts. Their gradients are set already."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

__all__: list[str] = []


class EvaluatesAgain(RuntimeError):
    """The optimizer asks for the gradients at another point."""


def step_locally(optimizer: Optimizer, loss: Any, keywords: Mapping[str, Any]) -> None:
    """Makes a step. If `step()` requires a closure, it gets one that returns `loss`, once.

    Raises:
        EvaluatesAgain: The optimizer calls the closure a second time. Other errors of the optimizer pass through.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        optimizer.step(_Told(loss), **keywords)
    else:
        optimizer.step(**keywords)


def takes_keywords(optimizer: Optimizer) -> bool:
    """Whether its `step()` has parameters besides a closure."""
    return bool(inspect.signature(optimizer.step).parameters.keys() - {"closure"})


class _Told:
    def __init__(self, loss: Any) -> None:
        self._loss, self._asked = loss, False

    def __call__(self) -> Any:
        if self._asked:
            raise EvaluatesAgain("the optimizer evaluates its closure several times in a step, and gradients are there for one")
        self._asked = True
        return self._loss
