"""Where each parameter lies in a layer's flat buffer: integers only, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__: list[str] = []

# Slots whose length is a multiple of this come first, so that each of them starts on a boundary
# that vectorised kernels need (64 bytes for fp32). Slots of other lengths follow, so no padding is
# needed between slots.
ALIGNMENT_NUMEL = 16


@dataclass(frozen=True)
class Slot:
    """One original parameter's place in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def stop(self) -> int:
        return self.offset + self.numel

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """The strides of a contiguous tensor of this shape, in elements."""
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    @cached_property
    def strided(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The arguments of `as_strided`: shape, stride, and offset in the flat buffer."""
        return self.shape, self.stride, self.offset


def side_by_side(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> tuple[Slot, ...]:
    """Makes slots of these names and shapes, one after another."""
    slots: list[Slot] = []
    for name, shape in shapes:
        slots.append(Slot(name, tuple(shape), slots[-1].stop if slots else 0))
    return tuple(slots)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a slot that one rank's chunk holds: elements `[start, stop)` of the slot, at
    `offset` in the chunk.
    """

    slot: Slot
    start: int
    stop: int
    offset: int

    @property
    def place(self) -> slice:
        """Its elements in the chunk."""
        return slice(self.offset, self.offset + self.stop - self.start)


@dataclass(frozen=True)
class ChunkLayout:
    """Slots side by side in a buffer of `world_size * shard_numel` elements, cut into `world_size`
    equal chunks.

     rank 0's chunk      rank 1's chunk      rank 2's chunk
    |-------- S --------|-------- S --------|-------- S --------|
    | slot a | slot b        | slot c   | slot d           |pad|    pad < W elements, always 0

    `bounds`, if given, are `world_size + 1` positions at which the buffer is cut instead; then
    there is no padding.
    """

    slots: tuple[Slot, ...]
    world_size: int
    bounds: tuple[int, ...] | None = None

    @classmethod
    def build(cls, shapes: Iterable[tuple[str, tuple[int, ...]]], world_size: int) -> ChunkLayout:
        named = list(shapes)
        # stable
        ordered = sorted(named, key=lambda item: math.prod(item[1]) % ALIGNMENT_NUMEL != 0)
        return cls(side_by_side(ordered), world_size)

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, found {self.world_size}")
        end = 0
        for slot in self.slots:
            if slot.offset != end:
                raise ValueError(
                    f"slot {slot.name!r} starts at {slot.offset}, expected {end}: slots must not "
                    "overlap or leave gaps"
                )
            end = slot.stop
        if len({slot.name for slot in self.slots}) != len(self.slots):
            raise ValueError("two slots share a name")
        cuts = self.bounds
        if cuts is not None and (
            len(cuts) != self.world_size + 1
            or sorted(cuts) != list(cuts)
            or (cuts[0], cuts[-1]) != (0, end)
        ):
            raise ValueError(
                f"bounds must rise from 0 to {end} in {self.world_size} steps, found {cuts}"
            )

    @cached_property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return self.slots[-1].stop if self.slots else 0

    @cached_property
    def shard_numel(self) -> int:
        """S, the length of each rank's chunk if all have the same length. See `chunk_numel`
        otherwise.
        """
        return -(-self.numel // self.world_size)

    @cached_property
    def padded_numel(self) -> int:
        """W * S, the length of the full buffer."""
        return self.shard_numel * self.world_size if self.bounds is None else self.numel

    @property
    def first_holder(self) -> int:
        """The first rank with a chunk that is not empty. Empty parameters, which are in no chunk,
        belong to it.
        """
        return next((rank for rank in range(self.world_size) if self.pieces(rank)), 0)

    def chunk_range(self, rank: int) -> tuple[int, int]:
        """The half-open range of the full buffer that is `rank`'s chunk."""
        if self.bounds is not None:
            return self.bounds[rank], self.bounds[rank + 1]
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def chunk_numel(self, rank: int) -> int:
        """The length of `rank`'s chunk, with padding."""
        low, high = self.chunk_range(rank)
        return high - low

    @cached_property
    def cuts(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For each rank the pieces of its chunk, as (slot number, start, stop). Padding has the
        number after the last slot's.
        """
        index = {slot.name: number for number, slot in enumerate(self.slots)}
        found = []
        for rank in range(self.world_size):
            cuts = [
                (index[piece.slot.name], piece.start, piece.stop) for piece in self.pieces(rank)
            ]
            padding = self.chunk_numel(rank) - sum(stop - start for _, start, stop in cuts)
            found.append((*cuts, (len(self.slots), 0, padding)) if padding else tuple(cuts))
        return tuple(found)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces of slots in `rank`'s chunk, in order. Empty slots have no piece."""
        low, high = self.chunk_range(rank)
        found = []
        for slot in self.slots:
            start, stop = max(low, slot.offset), min(high, slot.stop)
            if start < stop:
                found.append(Piece(slot, start - slot.offset, stop - slot.offset, start - low))
        return tuple(found)


class Spot(NamedTuple):
    """Where elements `[start, stop)` of a slot lie. `strided`: the arguments of `as_strided`."""

    start: int
    stop: int
    strided: tuple[tuple[int, ...], tuple[int, ...], int]


@dataclass(frozen=True)
class GradientLayout:
    """The full buffer as it travels to be reduced: each rank's slice, and `trailer` elements behind
    it.

    |-------- S --------|-n-|-------- S --------|-n-|-------- S --------|-n-|
    """

    of: ChunkLayout
    trailer: int

    @cached_property
    def numel(self) -> int:
        return self.of.padded_numel + self.of.world_size * self.trailer

    @cached_property
    def bounds(self) -> tuple[int, ...] | None:
        """As `ChunkLayout.bounds`."""
        bounds = self.of.bounds
        return bounds and tuple(at + rank * self.trailer for rank, at in enumerate(bounds))

    @cached_property
    def spots(self) -> tuple[tuple[Spot, ...], ...]:
        """Where each slot lies. One that is cut has a place before the first cut, one behind the
        last, and one for all slices between (one for each, if these have different lengths). What
        stands behind the last slot is padding.
        """
        layout, end = self.of, self.of.padded_numel
        padding = Slot("", (end - layout.numel,), layout.numel)
        return tuple(tuple(self._spots(slot)) for slot in (*layout.slots, padding))

    def _spots(self, slot: Slot) -> Iterator[Spot]:
        ranks: Sequence[int] = range(self.of.world_size)
        if self.of.bounds is None and slot.numel:
            length = self.of.shard_numel
            ranks = range(slot.offset // length, -(-slot.stop // length))
        overlaps = {rank: self._overlap(slot, rank) for rank in ranks}
        ranks = [rank for rank, (start, stop) in overlaps.items() if start < stop]
        if len(ranks) < 2 or not self.trailer:
            offset = slot.offset + (ranks[0] * self.trailer if ranks else 0)
            yield Spot(0, slot.numel, (slot.shape, slot.stride, offset))
            return
        equal = self.of.bounds is None and len(ranks) > 2
        for rank in (ranks[0], ranks[1], ranks[-1]) if equal else ranks:
            start, stop = overlaps[rank]
            offset = slot.offset + start + rank * self.trailer
            size: tuple[int, ...] = (stop - start,)
            stride: tuple[int, ...] = (1,)
            if equal and rank == ranks[1]:
                length, rows = self.of.shard_numel, len(ranks) - 2
                size, stride = (rows, length), (length + self.trailer, 1)
                stop = start + rows * length
            yield Spot(start, stop, (size, stride, offset))

    def _overlap(self, slot: Slot, rank: int) -> tuple[int, int]:
        """The slot's elements in a rank's slice, if there are any."""
        low, high = self.of.chunk_range(rank)
        return max(low, slot.offset) - slot.offset, min(high, slot.stop) - slot.offset

    @cached_property
    def trailers(self) -> tuple[Spot, ...]:
        """Where the trailers lie, in one place if slices are equal."""
        layout, n = self.of, self.trailer
        ends = [layout.chunk_range(rank)[1] + rank * n for rank in range(layout.world_size)]
        if layout.bounds is None:
            stride = (layout.shard_numel + n, 1)
            return (Spot(0, n, ((layout.world_size, n), stride, ends[0])),)
        return tuple(Spot(0, n, ((n,), (1,), end)) for end in ends)


def megabytes(nbytes: int) -> str:
    """A size for messages: "12.3 MB"."""
    return f"{nbytes / 1e6:.1f} MB"
