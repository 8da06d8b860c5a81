"""One step of the optimizer that knows only this rank's parts. Their gradients are there already."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

__all__: list[str] = []


class EvaluatesAgain(RuntimeError):
    """The optimizer wants the gradients at another place."""


def step_locally(optimizer: Optimizer, loss: Any, keywords: Mapping[str, Any]) -> None:
    """An optimizer whose `step()` demands a closure gets one that only tells the loss, once.

    Raises:
        EvaluatesAgain: it asks a second time. What the optimizer raises itself.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        optimizer.step(_Told(loss), **keywords)
    else:
        optimizer.step(**keywords)


def takes_keywords(optimizer: Optimizer) -> bool:
    """Whether its `step()` may be given something else than a closure."""
    return bool(inspect.signature(optimizer.step).parameters.keys() - {"closure"})


class _Told:
    def __init__(self, loss: Any) -> None:
        self._loss, self._asked = loss, False

    def __call__(self) -> Any:
        if self._asked:
            raise EvaluatesAgain("the optimizer evaluates its closure several times in a step, and gradients are there for one")
        self._asked = True
        return self._loss
