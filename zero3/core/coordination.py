"""Where a model's collectives pass: open, unless ranks that have run out of data have to be told of each (see `shadow`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

from ..comm.communicator import Bounds, Communicator
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
    """What a model asks before its collectives."""

    def enter(self, kind: Activity) -> None:
        """This rank begins with `kind`, unless it is within another."""
        ...

    def leave(self, kind: Activity, error: BaseException | None = None) -> None:
        """It is over, or ended with `error`."""
        ...

    def passing(self, action: Action, layer: object = None) -> AbstractContextManager[None]:
        """Around a collective, or those of a layer, from where they are issued."""
        ...


class OpenGate:
    def __init__(self) -> None:
        self._open = nullcontext()  # entered for every transfer of every step

    def enter(self, kind: Activity) -> None:
        return None

    def leave(self, kind: Activity, error: BaseException | None = None) -> None:
        return None

    def passing(self, action: Action, layer: object = None) -> AbstractContextManager[None]:
        return self._open


class GatedCommunicator:
    """In place of a layer's communicator, for all but its own gathers and reductions: its collectives pass the gate."""

    def __init__(self, inner: Communicator, gate: Gate) -> None:
        self.inner = inner
        self._gate = gate
        self.rank, self.world_size, self.channel = inner.rank, inner.world_size, inner.channel

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        with self._gate.passing(Action.OTHER):
            return self.inner.all_gather(full, shard, bounds)

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        with self._gate.passing(Action.OTHER):
            return self.inner.reduce_scatter(shard, full, bounds)

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

    def duplicate(self) -> Communicator:
        return self.inner.duplicate()

    def lanes(self, device: torch.device) -> Lanes:
        return self.inner.lanes(device)

    def same_ranks(self, other: Communicator) -> bool:
        return self.inner.same_ranks(ungated(other))


def ungated(communicator: Communicator) -> Communicator:
    return communicator.inner if isinstance(communicator, GatedCommunicator) else communicator
