"""Notes what passes in the model's ring, which outlives the process (comm/ring.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..comm.ring import BACKWARD, FORWARD, OUTSIDE, Ring, new_ring
from ..core.collectives import (
    Activity,
    Agree,
    Collective,
    CompareLogs,
    Conductor,
    Fetch,
    Gather,
    Look,
    Reduce,
    Round,
    Use,
    chain,
)
from ..core.layer_state import LayerState

__all__: list[str] = []


class Noting:
    """Notes each transfer of one layer before it begins, and when the layer waits and computes."""

    def __init__(self, inner: Conductor) -> None:
        self.inner = inner
        self._ring: Ring | None = None
        self._transfers: dict[type, int] = {}  # codes in this ring
        self._waits = self._computes = 0  # codes, too
        # the number of the latest gather, if the host waits for gathers
        self._gathered, self._host_waits = 0, False

    def conduct(self, what: Collective, *, absent: bool = False) -> Any:
        layer, kind = what.layer, type(what)
        if layer is None or (ring := (log := layer.chunks.log).ring) is None:
            return self.inner.conduct(what, absent=absent)
        if ring is not self._ring:
            self._write_into(ring, layer)
        if kind is Fetch:
            ring.put(self._waits, log.passes, 0)
            found = self.inner.conduct(what, absent=absent)
            ring.put(self._computes, log.passes, 0, self._gathered)
            return found
        if (code := self._transfers.get(kind)) is not None:
            number = ring.put(code, log.passes)
            if kind is Gather and self._host_waits:
                self._gathered = number
        elif isinstance(what, Round | Use) and not ring.is_ours:
            log.keep_in(None)
        elif isinstance(what, Round):
            return self._turn(ring, what, absent)
        elif isinstance(what, Use):
            ring.put(ring.code(what.by), log.passes, 0)
        elif what.moves:
            ring.put(ring.code(str(what)), log.passes)
        return self.inner.conduct(what, absent=absent)

    def _write_into(self, ring: Ring, layer: LayerState) -> None:
        def code(doing: str) -> int:
            return ring.code(doing, layer.label, layer.chunks.identity)

        comparing = ring.code("comparing")
        self._transfers = {
            Gather: code("gathering"),
            Reduce: code("reducing"),
            # a rank without data listens, and does not know of which layer
            Agree: ring.code("comparing", layer.label),
            CompareLogs: comparing,
            Look: comparing,
        }
        self._waits, self._computes = code("waiting"), code("computing")
        self._ring, self._gathered = ring, 0
        self._host_waits = layer.device.type == "cpu"

    def _turn(self, ring: Ring, what: Round, absent: bool) -> Any:
        if what.begins:
            ring.turn(FORWARD if what.activity is Activity.FORWARD else BACKWARD)
            return self.inner.conduct(what, absent=absent)
        try:
            return self.inner.conduct(what, absent=absent)
        finally:
            ring.turn(OUTSIDE)
            ring.put(ring.code("outside"), what.layer.chunks.log.passes, 0)


def keep_transfers(layers: Sequence[LayerState]) -> None:
    """From now on, the last transfers of a model lie in a ring, if it has more than one rank."""
    first = layers[0]
    if first.device.type == "meta":  # a plan's
        return
    ring = new_ring(first.communicator, first.chunks.identity)
    first.log.keep_in(ring)
    for layer in layers if ring is not None else ():
        if not any(isinstance(each, Noting) for each in chain(layer.conductor)):
            layer.conducted_by(Noting(layer.conductor))
