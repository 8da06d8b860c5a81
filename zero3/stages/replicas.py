"""Where chunks have replicas, each reduction goes on with a sum over these, on a lane of its own.

    backup lane     reduce layer 2    reduce layer 1    reduce layer 0
    replicas' lane                    sum layer 2       sum layer 1       sum layer 0

On the host a sum begins just before a later reduction, or at the end of the backward: all ranks
begin the transfers of both groups in one order, also a rank that only takes part in them. The sums
are waited for at the end of the backward, together: over three replicas or more a sum needs every
rank's wait. Each holds `S` elements, which become the chunk's gradient.
"""

from __future__ import annotations

from typing import cast

from ..comm.mesh import MeshCommunicator
from ..comm.streams import Pending
from ..core.flow import Travelling
from ..core.gradient_buffer import GradientBuffer

__all__: list[str] = []


class KeepInReplica:
    """Adds what earlier micro-batches have left of this replica's sums. A way that ends here leaves
    its sum, too (`no_sync(replicas_only=True)`).
    """

    lane = ""
    has_room = False

    def take_room(self, gradient: Travelling, buffer: GradientBuffer) -> None:
        return None

    def __call__(self, gradient: Travelling) -> None:
        account, summed = gradient.account, gradient.summed
        earlier = account.exchange_partial(None)
        if not gradient.ends_early and earlier is None:
            return
        # micro-batches are added up in the wider dtype
        kept = summed if summed.dtype == account.added_as else gradient.landed
        if kept is not summed:
            kept.copy_(summed)
        if earlier is not None:
            kept.add_(earlier)
            gradient.ticket().keep_alive(earlier)  # the lane reads it
        if gradient.ends_early:
            account.exchange_partial(kept)
        elif kept is not summed:
            summed.copy_(kept)


class SumReplicas:
    """Sums over the replicas, in a lane of its own. `averages`: see `ReduceScatter`."""

    lane = "replicas"
    has_room = False

    def __init__(self, *, averages: bool = False) -> None:
        self._averages = averages

    def take_room(self, gradient: Travelling, buffer: GradientBuffer) -> None:
        return None

    def __call__(self, gradient: Travelling) -> Pending:
        communicator = cast(MeshCommunicator, gradient.communicator)
        if self._averages:
            return communicator.average_replicas(gradient.summed)
        return communicator.sum_replicas(gradient.summed)
