"""Replicas of shards (HSDP): chunks are cut over one group of ranks, and repeated over another.

     shard rank 0    shard rank 1
replica 0   rank 0          rank 1      each row is a group of shards: gathers and reductions
replica 1   rank 2          rank 3      each column holds the same chunk: a sum over replicas
follows each reduction
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .board import Board, board_for, numbered
from .communicator import (
    Averages,
    Bounds,
    Communicator,
    SoloCommunicator,
    averages,
    history_of,
)
from .log import Told
from .process_group import Gathered, board_of
from .streams import Done, Lanes, OnHost, Pending, Then, has_streams, on_device

__all__: list[str] = []


class Replicas(Communicator, Protocol):
    """The ranks that hold the same chunk."""

    def all_reduce_later(self, tensor: Tensor) -> Pending:
        """Sums `tensor` over ranks, with the same bits on all of them, but only starts it."""
        ...

    def average_later(self, tensor: Tensor) -> Pending:
        """Does the same for the mean. Those that don't average need not have it."""
        ...


class MeshCommunicator:
    """The collectives of a mesh, made of those of its rows and columns. So no rank needs a third
    group.

    Gathers and reductions are those of this rank's row. All other collectives are among all ranks:
    first in the row, then in the column. `sum_replicas` is the second half of a reduction.
    """

    def __init__(self, row: Communicator, column: Replicas, members: Sequence[int] = ()) -> None:
        """`members`: the numbers of all ranks among those of the job, row by row."""
        self._row, self._column, self.members = row, column, members
        self.shard_rank, self.shards, self.replica = row.rank, row.world_size, column.rank
        self.rank = self.replica * self.shards + self.shard_rank
        self.world_size = self.shards * column.world_size
        self.takes_pieces = row.takes_pieces
        self.history = history_of(column).among(members)  # of all models over this mesh
        self.tags_messages = row.tags_messages and column.tags_messages
        # one shard's gradients are summed over replicas alone
        self.averages = (row.world_size == 1 or averages(row)) and averages(column)

    @property
    def row(self) -> Communicator:
        """Among the shards of this replica."""
        return self._row

    def of_one_shard(self) -> MeshCommunicator:
        """Among the ranks that hold the same chunk: each holds all that they share."""
        return MeshCommunicator(SoloCommunicator(), self._column)

    @property
    def channel(self) -> int:
        return self._row.channel

    @channel.setter
    def channel(self, number: int) -> None:
        self._row.channel = self._column.channel = number

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        return self._row.all_gather(full, shard, bounds)

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        return self._row.reduce_scatter(shard, full, bounds)

    def reduce_to_mean(self, shard: Tensor, full: Tensor) -> Pending:
        return cast(Averages, self._row).reduce_to_mean(shard, full)

    def reduce_pieces(self, shard: Tensor, pieces: Sequence[Sequence[Tensor]]) -> Pending:
        return self._row.reduce_pieces(shard, pieces)

    def all_to_all(
        self, received: Tensor, sent: Tensor, bounds: Bounds = None, into: Bounds = None
    ) -> Pending:
        return self._row.all_to_all(received, sent, bounds, into)

    def sum_replicas(self, shard: Tensor) -> Pending:
        """Sums `shard` `[S]` over the ranks that hold the same chunk, in place. It only
        starts it.
        """
        return self._column.all_reduce_later(shard) if shard.numel() else Done()

    def average_replicas(self, shard: Tensor) -> Pending:
        """Does the same for their mean, where the mesh `averages`."""
        return self._column.average_later(shard) if shard.numel() else Done()

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        self._row.all_reduce(tensor, maximum=maximum)
        self._column.all_reduce(tensor, maximum=maximum)

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        pending = self._row.scatter(shard, slices, bounds) if self.replica == 0 else Done()
        return Then(pending, lambda: self._column.broadcast(shard)) if shard.numel() else pending

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        replica, shard_rank = divmod(source, self.shards)
        if self.replica == replica:
            self._row.broadcast(tensor, shard_rank)
        self._column.broadcast(tensor, replica)

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        row = b"".join(self._row.exchange(payload, device))
        return [
            each[at : at + len(payload)]
            for each in self._column.exchange(row, device)
            for at in range(0, len(row), len(payload))
        ]

    def exchange_later(self, payload: bytes, device: torch.device) -> Told:
        with torch.inference_mode(False):  # what is gathered may be written later, outside of it
            mine = on_device(torch.frombuffer(bytearray(payload), dtype=torch.uint8), device)
            row = mine.new_empty(self.shards * len(payload))
            everyone = mine.new_empty(self.world_size * len(payload))
        self._row.all_gather(row, mine).wait()  # on streams the host does not wait
        pending = self._column.all_gather(everyone, row)
        return Gathered(
            pending, OnHost(everyone) if has_streams(device) else None, everyone, len(payload)
        )

    def duplicate(self) -> Communicator:
        return MeshCommunicator(self._row.duplicate(), self._column.duplicate(), self.members)  # type: ignore[arg-type]  # of the same class

    def lanes(self, device: torch.device) -> Lanes:
        return self._row.lanes(device)._replace(replicas=self._column.lanes(device).backup)

    def same_ranks(self, other: Communicator) -> bool:
        return (
            isinstance(other, MeshCommunicator)
            and self._row.same_ranks(other._row)
            and self._column.same_ranks(other._column)
        )

    def message_board(self) -> Board | None:
        if not self.members or board_for(self._column) is None:
            return None
        replicas = self.world_size // self.shards
        what = f"a mesh of {replicas} x {self.shards} of {numbered(self.members)}"
        return board_of(what, self.members, self.rank)


class BlocksCommunicator:
    """The collectives of ranks whose slices stand block by block, and not in the ranks' order.

        ranks      0 1 | 2 3        two ranks share a block: the first of each row the first one
        slices     0 2 | 1 3

    These slices have `bounds`. Their gathers and scatters are for reading and writing, not for
    training: what was gathered is copied once more. Without bounds slices are those of the ranks.
    """

    def __init__(self, inner: Communicator, blocks: int) -> None:
        self.inner = inner
        shares = inner.world_size // blocks
        self._slices = [rank % blocks * shares + rank // blocks for rank in range(inner.world_size)]
        self.shard_rank = self._slices[inner.rank]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        if bounds is None:
            return self.inner.all_gather(full, shard)
        of_ranks, gathered = self._of_ranks(bounds), torch.empty_like(full)

        def sort() -> None:
            for index, (start, stop) in zip(self._slices, pairwise(of_ranks), strict=True):
                full[bounds[index] : bounds[index + 1]] = gathered[start:stop]

        return Then(self.inner.all_gather(gathered, shard, of_ranks), sort)

    def _of_ranks(self, bounds: tuple[int, ...]) -> tuple[int, ...]:
        lengths = [stop - start for start, stop in pairwise(bounds)]
        return (0, *accumulate(lengths[index] for index in self._slices))

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        if bounds is None:
            return self.inner.scatter(shard, slices)
        of_ranks = None if slices is None else [slices[index] for index in self._slices]
        return self.inner.scatter(shard, of_ranks, self._of_ranks(bounds))

    def same_ranks(self, other: Communicator) -> bool:
        return self.inner.same_ranks(other.inner if isinstance(other, type(self)) else other)


def shards_of(communicator: Communicator) -> Communicator:
    """The ranks that hold one copy of the chunks together: those of this rank's replica, or all."""
    return communicator._row if isinstance(communicator, MeshCommunicator) else communicator
