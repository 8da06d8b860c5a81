"""Gates. A model starts each collective inside a context of its gate. `Join` and `step_guard` need
that; the usual gate does nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.agreement import agree
from ..comm.board import Board, board_for
from ..comm.communicator import Bounds, Communicator
from ..comm.log import Told
from ..comm.streams import Lanes, Pending

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


class ComparingGate(OpenGate):
    """A gate for debugging (`compare_every=1`): before each gather, ranks compare all transfers so
    far.
    """

    def gather(self, layer: Any) -> AbstractContextManager[Any]:  # type: ignore[override]
        if layer.chunks:
            agree(
                ungated(layer.communicator),
                layer.device,
                "the transfers made so far",
                [layer.log.summary()],
            )
        return nullcontext()


def gate_for(compare_every: int) -> Gate:
    """A layer's gate outside `Join` and `step_guard`."""
    return ComparingGate() if compare_every == 1 else OpenGate()


class GatedCommunicator:
    """A layer's communicator under `Join`, whose collectives go through the gate. The layer's own
    gathers and reductions don't use it.
    """

    def __init__(self, inner: Communicator, gate: Gate) -> None:
        self.inner = inner
        self._gate = gate
        self.rank, self.world_size, self.channel = inner.rank, inner.world_size, inner.channel
        self.shard_rank, self.shards, self.replica = inner.shard_rank, inner.shards, inner.replica
        self.takes_pieces, self.tags_messages = False, inner.tags_messages

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        with self._gate.passing(Action.OTHER):
            return self.inner.all_gather(full, shard, bounds)

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        with self._gate.passing(Action.OTHER):
            return self.inner.reduce_scatter(shard, full, bounds)

    def reduce_pieces(self, shard: Tensor, pieces: Any) -> Pending:
        with self._gate.passing(Action.OTHER):
            return self.inner.reduce_pieces(shard, pieces)

    def all_to_all(self, received: Tensor, sent: Tensor, bounds: Bounds = None) -> Pending:
        with self._gate.passing(Action.OTHER):
            return self.inner.all_to_all(received, sent, bounds)

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        with self._gate.passing(Action.OTHER):
            self.inner.all_reduce(tensor, maximum=maximum)

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        with self._gate.passing(Action.OTHER):
            return self.inner.scatter(shard, slices, bounds)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        with self._gate.passing(Action.OTHER):
            self.inner.broadcast(tensor, source)

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        with self._gate.passing(Action.OTHER):
            return self.inner.exchange(payload, device)

    def exchange_later(self, payload: bytes, device: torch.device) -> Told:
        with self._gate.passing(Action.OTHER):
            return self.inner.exchange_later(payload, device)

    def duplicate(self) -> Communicator:
        return self.inner.duplicate()

    def lanes(self, device: torch.device) -> Lanes:
        return self.inner.lanes(device)

    def same_ranks(self, other: Communicator) -> bool:
        return self.inner.same_ranks(ungated(other))

    def message_board(self) -> Board | None:
        return board_for(self.inner)


def ungated(communicator: Communicator) -> Communicator:
    return communicator.inner if isinstance(communicator, GatedCommunicator) else communicator
