"""The communicator of a layer under `Join`: its collectives go through the layer's gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.board import Board, board_for
from ..comm.communicator import Bounds, Communicator
from ..comm.log import Told
from ..comm.streams import Lanes, Pending
from ..core.coordination import Action, Gate

__all__: list[str] = []


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
