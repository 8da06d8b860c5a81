"""What a model tells before it makes a collective. Nobody has to hear it, unless some ranks have no data, or one has to repeat it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor

from ..comm.agreement import agree
from ..comm.communicator import Bounds, Communicator, Told
from ..comm.streams import Lanes, Pending

__all__: list[str] = []


class Activity(IntEnum):
    """What a rank does with its model. Ranks meet at the first collective of each."""

    FORWARD = 0
    BACKWARD = 1
    STEP = 2
    OTHER = 3  # a collective that belongs to none of these


class Action(IntEnum):
    """What all ranks do next. The highest that any rank says counts."""

    END = 1  # nothing more of what they met for
    GATHER = 2  # a layer's chunks
    REDUCE = 3  # a layer's gradients
    AGREE = 4  # compare what they are about to do
    LOOK = 5  # whether layers that stay whole have changed
    TOKENS = 6  # count the tokens of a micro-batch
    OTHER = 7  # what a rank without data can't take part in
    ABORT = 8  # a rank has raised


class Gate(Protocol):
    """Every collective of a model passes its gate, inside one of these contexts."""

    compares_at_end: bool  # of what is under way: then ranks need not compare their transfers before

    def doing(self, activity: Activity) -> AbstractContextManager[Any]:
        """Around a forward or a backward. It does not count if this rank is within another one already."""
        ...

    def gather(self, layer: Any) -> AbstractContextManager[Any]:
        """Around the gathers of a layer's chunks, where they are issued."""
        ...

    def reduce(self, layer: Any) -> AbstractContextManager[Any]:
        """Around the reductions of a layer's gradients, where they are issued."""
        ...

    def compare(self, layer: Any, place: str, names: list[str]) -> AbstractContextManager[Any]:
        """Around a comparison of `names`, which ranks make at `place`."""
        ...

    def passing(self, action: Action, layer: Any = None) -> AbstractContextManager[Any]:
        """Around any other collective."""
        ...


class OpenGate:
    """Nobody hears of anything: the standard library's null context stands for every context of a step."""

    compares_at_end = False
    doing = gather = reduce = nullcontext

    def compare(self, layer: Any, place: str, names: list[str]) -> AbstractContextManager[Any]:
        return nullcontext()

    def passing(self, action: Action, layer: Any = None) -> AbstractContextManager[Any]:
        return nullcontext()


class ComparingGate(OpenGate):
    """For debugging (`compare_every=1`): before each gather ranks compare all transfers that they have made."""

    def gather(self, layer: Any) -> AbstractContextManager[Any]:  # type: ignore[override]
        if layer.chunks:
            agree(ungated(layer.communicator), layer.device, "the transfers made so far", [layer.log.summary()])
        return nullcontext()


def gate_for(compare_every: int) -> Gate:
    """The gate of a layer as long as nothing else is asked for."""
    return ComparingGate() if compare_every == 1 else OpenGate()


class GatedCommunicator:
    """In place of a layer's communicator, for all but its own gathers and reductions: its collectives pass the gate."""

    def __init__(self, inner: Communicator, gate: Gate) -> None:
        self.inner = inner
        self._gate = gate
        self.rank, self.world_size, self.channel = inner.rank, inner.world_size, inner.channel
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


def ungated(communicator: Communicator) -> Communicator:
    return communicator.inner if isinstance(communicator, GatedCommunicator) else communicator
