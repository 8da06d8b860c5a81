"""For debugging (`compare_every=1`): ranks compare all transfers so far, before each gather."""

from __future__ import annotations

from typing import Any

from ..comm.agreement import Members, agree
from ..core.collectives import Collective, Conductor, Gather, Straight
from .conducted import unconducted

__all__: list[str] = []


class Comparing:
    """Before each gather, ranks compare all transfers so far."""

    def __init__(self, inner: Conductor) -> None:
        self.inner = inner

    def conduct(self, what: Collective, *, absent: bool = False) -> Any:
        if isinstance(what, Gather):
            layer = what.layer
            agree(
                Members(unconducted(layer.communicator), layer.device),
                "the transfers made so far",
                [layer.log.summary()],
            )
        return self.inner.conduct(what, absent=absent)


def conductor_for(compare_every: int) -> Conductor:
    """A layer's own."""
    return Comparing(Straight()) if compare_every == 1 else Straight()
