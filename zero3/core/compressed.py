"""Compressed transfers: chunks and gradients that travel in a format of eight bits
(`gather_format`, `reduce_format`).

    chunk [S]     encode ->  row of this rank [S]      all-gather   rows of all [W*S]        decode
    ->  full [W*S] full gradient [W*S]  encode ->  rows to all [W*S]  all-to-all   rows from all [W,
    S]     decode, add ->  sum [S]

A row is a slice of `S` elements as bytes: codes, and a scale for each block. Work of the lane
stands before and behind each transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor, nn

from ..comm.communicator import Bounds, Communicator
from ..comm.errors import Subject
from ..comm.streams import Pending, Then
from ..policy import ShardingPolicy, compute_dtype, gather_format, gradient_dtype, reduce_format
from ..quantized.formats import Format, Int8
from ..quantized.wire import Row, Rows, Workspace
from .chunk import Chunk
from .gradient_buffer import Sending
from .layout import ChunkLayout

__all__: list[str] = []


def chunk_for(
    layout: ChunkLayout, shard: nn.Parameter, communicator: Communicator, policy: ShardingPolicy
) -> Chunk:
    """A chunk as the policy has it gathered."""
    dtype = compute_dtype(policy, shard.dtype)
    kind = gather_format(policy, communicator, shard.dtype)
    return (
        Chunk(layout, shard, communicator, dtype)
        if kind is None
        else CompressedChunk(layout, shard, communicator, dtype, kind)
    )


class _Room(NamedTuple):
    """The memory of one gather."""

    raw: Tensor  # the rows of all ranks
    work: Workspace


class CompressedChunk(Chunk):
    """A chunk that travels in a format while it trains. What computes is what the format makes of
    it, on the rank that owns it too.
    """

    def __init__(
        self,
        layout: ChunkLayout,
        shard: nn.Parameter,
        communicator: Communicator,
        compute_dtype: torch.dtype,
        kind: Format,
    ) -> None:
        self._rows = Rows(kind, [layout.chunk_numel(rank) for rank in range(layout.world_size)])
        self._room: _Room | None = None
        self.format = kind
        super().__init__(layout, shard, communicator, compute_dtype)

    @property
    def casts(self) -> bool:
        return self.shard.requires_grad or super().casts

    @property
    def _compresses(self) -> bool:
        return self.shard.requires_grad and not self._as_stored

    def make_room(self, *, as_stored: bool = False) -> None:
        super().make_room(as_stored=as_stored)
        if self._compresses and not self.filled:
            self._room = self._new_room()

    def _new_room(self) -> _Room:
        return _Room(self._rows.empty(self.shard.device), self._rows.work(self.shard.device))

    @torch.no_grad()
    def _gather(self, full: Tensor) -> Pending:
        if not self._compresses:
            return super()._gather(full)
        room = self._room or self._new_room()
        own = self._rows.of(room.raw, self.index)
        self._rows[self.index].encode([self.shard.data], own, room.work)
        pending = self._communicator.all_gather(room.raw, own, self._rows.bounds)
        return Then(pending, partial(self._decode, full, room))

    @torch.no_grad()
    def _decode(self, full: Tensor, room: _Room) -> None:
        for rank in range(self.layout.world_size):
            out = full[slice(*self.layout.chunk_range(rank))]
            self._rows[rank].decode(self._rows.of(room.raw, rank), out, room.work)

    def finish_fetch(self) -> None:
        super().finish_fetch()
        self._room = None

    def _as_gathered(self, dtype: torch.dtype) -> Tensor:
        if not self._compresses:
            return super()._as_gathered(dtype)
        row, out = self._rows[self.index], torch.empty_like(self.shard.data, dtype=dtype)
        raw, work = out.new_empty(row.nbytes, dtype=torch.uint8), self._rows.work(out.device)
        row.encode([self.shard.data], raw, work)
        row.decode(raw, out, work)
        return out


def sending_for(
    policy: ShardingPolicy, chunk: Chunk, communicator: Communicator, subject: Subject
) -> tuple[
    Callable[[list[list[Tensor]] | None, Tensor | None, Tensor, Tensor], Sending], torch.dtype
]:
    """Returns how the gradients of a chunk travel, and the dtype in which they are summed over
    ranks.
    """
    kind = reduce_format(policy, communicator, chunk.shard.dtype)
    if kind is None:
        return Sending, gradient_dtype(policy, chunk.shard.dtype)
    return CompressedReductions(kind, chunk, communicator, subject), torch.float32


class CompressedReductions:
    """The reductions of one chunk: each rank encodes its gradients once, and their owner adds what
    all have sent, in float32.
    """

    def __init__(
        self, kind: Format, chunk: Chunk, communicator: Communicator, subject: Subject
    ) -> None:
        layout = chunk.layout
        self.rows = Rows(kind, [layout.chunk_numel(rank) for rank in range(layout.world_size)])
        self.layout = layout
        self.index = chunk.index
        self._subject = subject
        self._seed = kind.seed if isinstance(kind, Int8) and kind.stochastic else None
        self._origin = crc32(
            repr((self._seed, communicator.rank, [slot.name for slot in layout.slots])).encode()
        )
        self._count = 0

    def __call__(
        self, pieces: list[list[Tensor]] | None, full: Tensor | None, summed: Tensor, landed: Tensor
    ) -> CompressedSending:
        self._count += 1
        return CompressedSending(self, pieces, full, summed, landed)

    def key(self, target: int) -> int:
        """For the random numbers of the present reduction's row to rank `target`: 32 bits with a
        sign. 0 if there are none.
        """
        if self._seed is None:
            return 0
        number = crc32(f"{self._origin} {self._subject.name} {self._count} {target}".encode())
        return number - (number >> 31 << 32)


class CompressedSending(Sending):
    """One reduction in a format."""

    __slots__ = ("_received", "_reductions", "_sent", "_work")

    def __init__(
        self,
        reductions: CompressedReductions,
        pieces: list[list[Tensor]] | None,
        full: Tensor | None,
        summed: Tensor,
        landed: Tensor,
    ) -> None:
        super().__init__(pieces, full, summed, landed)
        rows, device = reductions.rows, summed.device
        self._reductions = reductions
        self._sent, self._work = rows.empty(device), rows.work(device)
        self._received = self._sent.new_empty(
            reductions.layout.world_size * rows[reductions.index].nbytes
        )
        self.travelling = full, self._sent, self._received, self._work

    def start(self, communicator: Communicator, bounds: Bounds) -> Pending:
        reductions, full = self._reductions, self.full
        rows, layout = reductions.rows, reductions.layout
        for rank in range(layout.world_size):
            slices = (
                [full[slice(*layout.chunk_range(rank))]] if full is not None else self.pieces[rank]  # type: ignore[index]
            )
            rows[rank].encode(slices, rows.of(self._sent, rank), self._work, reductions.key(rank))
        self.pieces = None  # they are not needed any more
        pending = communicator.all_to_all(self._received, self._sent, rows.bounds)
        return Then(
            pending,
            partial(_sum_up, rows[reductions.index], self._received, self.summed, self._work),
        )


@torch.no_grad()
def _sum_up(row: Row, received: Tensor, total: Tensor, work: Workspace) -> None:
    """Adds what all ranks have sent, in rank order."""
    for start in range(0, received.numel(), max(1, row.nbytes)):
        row.decode(received[start : start + row.nbytes], total, work, add=start > 0)
