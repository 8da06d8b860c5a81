"""Gradients of chunks that have replicas: each reduction goes on with a sum over these, on a lane
of its own.

    backup lane     reduce layer 2    reduce layer 1    reduce layer 0
    replicas' lane                    sum layer 2       sum layer 1       sum layer 0

On the host a sum begins just before a later reduction, or at the end of the backward: all ranks
begin the transfers of both groups in one order, also a rank that only takes part in them. The sums
are waited for at the end of the backward, together: over three replicas or more a sum needs every
rank's wait. Each holds `S` elements, which become the chunk's gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple, cast

from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.errors import Subject
from ..comm.mesh import MeshCommunicator
from ..comm.streams import Lane, Lanes, Mark, Pending
from ..policy import ShardingPolicy
from .gradient_buffer import Sending
from .gradient_reducer import Backup, GradientReducer, LayerGradients
from .transactions import TransactionalReducer

__all__: list[str] = []

Prepared = tuple[GradientReducer, Sending]


def gradients_for(
    communicator: Communicator, policy: ShardingPolicy, subject: Subject
) -> LayerGradients:
    """The reducers of a new layer, as its communicator and its policy ask for."""
    kind = ReplicatedGradients if communicator.shards < communicator.world_size else LayerGradients
    return kind(
        communicator,
        policy,
        subject,
        TransactionalReducer if policy.transactional else GradientReducer,
    )


class ReplicatedGradients(LayerGradients):
    """A layer's reducers on a mesh. Under `no_sync(replicas_only=True)` they keep the replica's
    sums `[S]` for a later backward.
    """

    # the number of `no_sync(replicas_only=True)` contexts that the layer is in
    _replica_deferrals = 0

    def defer(self, contexts: int, *, replicas_only: bool) -> None:
        if replicas_only:
            self._replica_deferrals += contexts
        else:
            super().defer(contexts, replicas_only=False)

    @property
    def may_reduce(self) -> bool:
        return not self._replica_deferrals and super().may_reduce

    @property
    def fate(self) -> str:  # type: ignore[override]
        return (
            "gradients reduced in each replica (as under no_sync(replicas_only=True))"
            if self._replica_deferrals
            else "gradients reduced"
        )

    def back_up(
        self, prepared: list[Prepared], lanes: Lanes, communicator: Communicator
    ) -> list[Backup]:
        with self._naming:
            cast(Lane, lanes.replicas).begin_deferred()
        onward = _Onward(
            lanes, cast(MeshCommunicator, communicator), iter(prepared), keeps=not self.may_reduce
        )
        backups = super().back_up(
            prepared, Lanes(lanes.fetch, onward, lanes.replicas), communicator
        )
        if not self.may_reduce:
            for reducer, _ in prepared:
                reducer.keep(self)
            if (backward := self.backward()) is not None:
                backward.owes = True
        return backups


class _Onward:
    """The backup lane of one layer's reductions, which go on to the replicas' lane."""

    def __init__(
        self,
        lanes: Lanes,
        communicator: MeshCommunicator,
        prepared: Iterator[Prepared],
        *,
        keeps: bool,
    ) -> None:
        self._lanes, self._communicator = lanes, communicator
        self._prepared = prepared  # one for each `complete`
        self._keeps = keeps

    def issue(self) -> AbstractContextManager[object]:
        return self._lanes.backup.issue()

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Mark:
        reducer, sending = next(self._prepared)
        lane, communicator, reduced = (
            cast(Lane, self._lanes.replicas),
            self._communicator,
            _Reduced(),
        )

        summed, landed = sending.summed, sending.landed

        def begin() -> Mark:  # it holds nothing that the reduction needed, which is over by then
            with lane.issue():  # this lane waits for the backup lane, which is the current one
                return lane.complete(communicator.sum_replicas(summed), then)

        def go_on() -> None:
            reduced.earlier, reducer.partial = reducer.partial, None
            if self._keeps or reduced.earlier is not None:
                kept = summed if summed.dtype == reducer.added_as else landed
                if kept is not summed:
                    kept.copy_(summed)
                if reduced.earlier is not None:
                    kept.add_(reduced.earlier)
                if self._keeps:
                    reducer.partial = kept
                    return
                if kept is not summed:
                    summed.copy_(kept)
            reduced.later = _Later(lane.defer(begin), (summed, landed))

        reduced.mark = self._lanes.backup.complete(pending, go_on)
        return reduced

    def defer(self, begin: Callable[[], Mark]) -> Mark:
        return self._lanes.backup.defer(begin)

    def begin_deferred(self) -> None:
        self._lanes.backup.begin_deferred()


class _Later(NamedTuple):
    """The end of a sum over replicas, which holds its buffers until then."""

    mark: Mark
    held: tuple[Tensor, ...]

    def wait(self) -> Mark | None:
        return self.mark.wait()


class _Reduced:
    """The end of a reduction in one replica. It holds the sum that earlier micro-batches left,
    because the lane reads it.
    """

    mark: Mark
    earlier: Tensor | None = None
    later: Mark | None = None

    def wait(self) -> Mark | None:
        self.mark.wait()
        return self.later
