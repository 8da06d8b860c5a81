"""For debugging (`compare_every=1`): ranks compare all transfers so far, before each gather."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..comm.agreement import agree
from ..core.coordination import Action, Gate, OpenGate
from .gated import ungated

__all__: list[str] = []


class ComparingGate:
    """Before each gather, ranks compare all transfers so far."""

    compares_at_end = False
    doing = reduce = nullcontext

    def gather(self, layer: Any) -> AbstractContextManager[Any]:
        if layer.chunks:
            agree(
                ungated(layer.communicator),
                layer.device,
                "the transfers made so far",
                [layer.log.summary()],
            )
        return nullcontext()

    def compare(self, layer: Any, place: str, names: list[str]) -> AbstractContextManager[Any]:
        return nullcontext()

    def passing(self, action: Action, layer: Any = None) -> AbstractContextManager[Any]:
        return nullcontext()


def gate_for(compare_every: int) -> Gate:
    """A layer's gate outside `Join` and `step_guard`."""
    return ComparingGate() if compare_every == 1 else OpenGate()
