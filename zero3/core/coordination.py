"""Gates. A model starts each collective inside a context of its gate. `Join` and `step_guard` need
that; the usual gate does nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, Protocol

__all__: list[str] = []


class Activity(IntEnum):
    """A phase of a rank's work with its model. Under `Join`, ranks meet at the first collective of
    each phase.
    """

    FORWARD = 0
    BACKWARD = 1
    STEP = 2
    OTHER = 3  # a collective that belongs to none of these


class Action(IntEnum):
    """A collective that ranks make together. If ranks announce different ones, the highest
    counts.
    """

    END = 1  # none: the activity is over
    GATHER = 2  # gather a layer's chunks
    REDUCE = 3  # reduce a layer's gradients
    KEEP = 4  # reduce a layer's gradients in each replica, and keep the sums for a later backward
    # wait for what goes on after reductions: sums over replicas, which need the waits of all ranks
    SETTLE = 5
    AGREE = 6  # compare what ranks will do next
    LOOK = 7  # find the layers that stay whole and whose chunks have changed
    TOKENS = 8  # count the tokens of a micro-batch
    GUARD = 9  # tell each other at the end of a `step_guard` who has failed
    OTHER = 10  # a collective that a rank without data can't take part in
    ABORT = 11  # none: a rank has raised


class Gate(Protocol):
    """Contexts of a model. Each of its collectives is started inside one of them."""

    # whether ranks compare their transfers at the end of each activity, and need not do so before
    compares_at_end: bool

    def doing(self, activity: Activity) -> AbstractContextManager[Any]:
        """Context for a forward or a backward. Inside another one it does nothing."""
        ...

    def gather(self, layer: Any) -> AbstractContextManager[Any]:
        """Context in which the gathers of a layer's chunks are started."""
        ...

    def reduce(self, layer: Any) -> AbstractContextManager[Any]:
        """Context in which the reductions of a layer's gradients are started."""
        ...

    def compare(self, layer: Any, place: str, names: list[str]) -> AbstractContextManager[Any]:
        """Context in which ranks compare `names`. `place` is the name of the comparison."""
        ...

    def passing(self, action: Action, layer: Any = None) -> AbstractContextManager[Any]:
        """Context for any other collective."""
        ...


class OpenGate:
    """The usual gate, whose contexts do nothing."""

    compares_at_end = False
    doing = gather = reduce = nullcontext

    def compare(self, layer: Any, place: str, names: list[str]) -> AbstractContextManager[Any]:
        return nullcontext()

    def passing(self, action: Action, layer: Any = None) -> AbstractContextManager[Any]:
        return nullcontext()
