"""Compressed transfers: chunks and gradients that travel in a format of eight bits
(`gather_format`, `reduce_format`).

    chunk [S]             encode  row of this rank [S]      all-gather  rows of all [W*S]
                          decode  full [W*S]
    full gradient [W*S]   encode  rows to all [W*S]         all-to-all  rows from all [W, S]
                          decode, add  sum [S]

A row is a slice of `S` elements as bytes: codes, and a scale for each block. Workspace of the lane
stands before and behind each transfer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from zlib import crc32

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.errors import Subject
from ..comm.streams import Pending, Then
from ..core.chunk import Chunk, Placement, Plain, Room, passing
from ..core.flow import Travelling, take_gradients
from ..core.gradient_buffer import GradientBuffer
from ..core.layout import ChunkLayout
from ..quantized.formats import Format, Int8
from ..quantized.wire import Row, Rows, Workspace, row_kernels_on

__all__: list[str] = []


def _rows_of(kind: Format, layout: ChunkLayout, device: torch.device, trailer: int = 0) -> Rows:
    lengths = [layout.chunk_numel(rank) for rank in range(layout.world_size)]
    return Rows(kind, lengths, trailer, row_kernels_on(device, kind))


class Coded:
    """A chunk travels in a format while it trains. What computes is what the format makes of it, on
    the rank that owns it too.
    """

    decodes = True

    def __init__(self, kind: Format, layout: ChunkLayout, device: torch.device) -> None:
        self.rows = _rows_of(kind, layout, device)
        self._plain = Plain()  # how it travels while it is frozen

    def rounds(self, chunk: Chunk) -> bool:
        return chunk.shard.requires_grad

    def room(self, chunk: Chunk, full: Tensor, among: Placement) -> Room:
        if not chunk.shard.requires_grad:
            return self._plain.room(chunk, full, among)
        received, work = self.rows.empty(chunk.device), self.rows.work(chunk.device)
        own = self.rows.of(received, chunk.index)
        return Room(received, own, passing(chunk), self.rows.bounds, work)

    @torch.no_grad()
    def put(self, chunk: Chunk, room: Room) -> Tensor:
        if room.work is None or room.own is None:
            return self._plain.put(chunk, room)
        values = chunk.store.lend(chunk.shard.data, room.lent)
        self.rows[chunk.index].encode([values], room.own, room.work)
        return room.own

    def behind(self, chunk: Chunk, room: Room, full: Tensor) -> Callable[[], None] | None:
        return None if room.work is None else partial(self._decode, chunk, room, full)

    @torch.no_grad()
    def _decode(self, chunk: Chunk, room: Room, full: Tensor) -> None:
        layout = chunk.layout
        for rank in range(layout.world_size):
            out = full[slice(*layout.chunk_range(rank))]
            self.rows[rank].decode(self.rows.of(room.received, rank), out, room.work)

    def as_gathered(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        if not chunk.shard.requires_grad:
            return self._plain.as_gathered(chunk, dtype)
        # where it is encoded for a gather, so that the bits are the same
        values = chunk.store.lend(chunk.shard.data, passing(chunk))
        row, out = self.rows[chunk.index], torch.empty_like(values, dtype=dtype)
        raw, work = out.new_empty(row.nbytes, dtype=torch.uint8), self.rows.work(out.device)
        row.encode([values], raw, work)
        row.decode(raw, out, work)
        return out


class CodedReduceScatter:
    """In place of `ReduceScatter`: each rank encodes its gradients once, and their owner adds what
    all have sent, in float32 and in rank order. The trailer is a byte for each slot, as it is.
    """

    lane = "backup"
    has_room = True

    def __init__(
        self, kind: Format, chunk: Chunk, communicator: Communicator, subject: Subject
    ) -> None:
        layout = chunk.layout
        self._slots = len(layout.slots)
        self.rows = _rows_of(kind, layout, chunk.device, self._slots)
        self._layout, self._index, self._subject = layout, chunk.index, subject
        self._seed = kind.seed if isinstance(kind, Int8) and kind.stochastic else None
        self._origin = crc32(
            repr((self._seed, communicator.rank, [slot.name for slot in layout.slots])).encode()
        )
        self._count = 0

    def take_room(self, gradient: Travelling, buffer: GradientBuffer) -> None:
        take_gradients(gradient, buffer, torch.float32)
        chunk, rows = gradient.account.chunk, self.rows
        numel = chunk.shard.numel() + self._slots
        gradient.summed = torch.empty(numel, dtype=torch.float32, device=chunk.device)
        sent = rows.empty(chunk.device)
        for trailer in rows.trailers(sent):
            if gradient.reached is None:
                trailer.fill_(1)
            else:
                trailer.copy_(buffer.trailer(self._slots, torch.uint8))
        received = sent.new_empty(self._layout.world_size * rows.sent_to(self._index))
        gradient.work = sent, received, rows.work(chunk.device)
        self._count += 1

    def __call__(self, gradient: Travelling) -> Pending:
        rows, full, pieces = self.rows, gradient.full, gradient.pieces
        sent, received, work = gradient.work
        for rank in range(self._layout.world_size):
            slices = (
                [full[slice(*self._layout.chunk_range(rank))]] if full is not None else pieces[rank]  # type: ignore[index]
            )
            rows[rank].encode(slices, rows.of(sent, rank), work, self._key(rank))
        gradient.pieces = None  # they are not needed any more
        pending = gradient.communicator.all_to_all(received, sent, rows.bounds)
        came = received.view(self._layout.world_size, -1)
        return Then(pending, partial(_sum_up, rows[self._index], came, gradient.summed, work))

    def _key(self, target: int) -> int:
        """For the random numbers of the present reduction's row to rank `target`: 32 bits with a
        sign. 0 if there are none.
        """
        if self._seed is None:
            return 0
        number = crc32(f"{self._origin} {self._subject.name} {self._count} {target}".encode())
        return number - (number >> 31 << 32)


@torch.no_grad()
def _sum_up(row: Row, received: Tensor, total: Tensor, work: Workspace) -> None:
    """Adds what all ranks have sent, `[W, bytes]`, in rank order."""
    for number, raw in enumerate(received):
        row.decode(raw[: row.nbytes], total[: row.numel], work, add=number > 0)
    trailer = total[row.numel :]
    trailers = received[:, row.nbytes : row.nbytes + trailer.numel()]
    torch.sum(trailers, 0, dtype=total.dtype, out=trailer)
