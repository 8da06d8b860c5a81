"""Where each parameter lies in a layer's flat buffer: integers only, no tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

__all__: list[str] = []

# Slots whose length is a multiple of this come first, so that each of them starts on a boundary
# that vectorised kernels need (64 bytes for fp32). Slots of other lengths follow, so no padding is
# needed between slots.
ALIGNMENT_NUMEL = 16
# elements of a gradient that is copied together with others: torch's kernel for several tensors
# takes 21 million, so that a large one alone would be many kernels
SMALL = 2**22
# pieces of all gradients that are copied so: the host makes a view of each, and a kernel takes 64
FEW = 128


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
            low, high = self.chunk_range(rank)
            low = max(low, self.numel)  # from here on it is padding
            if low < high:
                cuts.append((len(self.slots), low - self.numel, high - self.numel))
            found.append(tuple(cuts))
        return tuple(found)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces of slots in `rank`'s chunk, in order. Empty slots have no piece."""
        found = (self.piece(slot, rank) for slot in self.slots)
        return tuple(piece for piece in found if piece is not None)

    def piece(self, slot: Slot, rank: int) -> Piece | None:
        """What `rank`'s chunk holds of a slot. None: nothing."""
        low, high = self.chunk_range(rank)
        start, stop = max(low, slot.offset), min(high, slot.stop)
        if start >= stop:
            return None
        return Piece(slot, start - slot.offset, stop - slot.offset, start - low)


class Spot(NamedTuple):
    """Where elements `[start, stop)` of a slot lie. `strided`: the arguments of `as_strided`."""

    start: int
    stop: int
    strided: tuple[tuple[int, ...], tuple[int, ...], int]


class Cells(NamedTuple):
    """The pieces of one slot: their numbers among all that the buffer holds, and their lengths."""

    numbers: list[int]
    lengths: list[int]


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
    def contents(self) -> list[tuple[int, int, int, int]]:
        """What the buffer holds, in order, as (rank, slot number, start, stop): pieces of slots,
        padding, which stands behind the last slot, and trailers, which come after padding.
        """
        last, found = len(self.of.slots) + 1, []
        for rank, cuts in enumerate(self.of.cuts):
            behind = [(last, 0, self.trailer)] if self.trailer else []
            found += [(rank, *cut) for cut in (*cuts, *behind)]
        return found

    @cached_property
    def sizes(self) -> list[int]:
        return [stop - start for _, _, start, stop in self.contents]

    @cached_property
    def is_few(self) -> bool:
        """Whether its pieces are copied together."""
        return len(self.sizes) <= FEW

    @cached_property
    def fits_one_copy(self) -> bool:
        """Whether it may be one copy of all pieces side by side. Padding would need zeros of its
        own, which are memory beside the buffer.
        """
        small = all(slot.numel <= SMALL for slot in self.of.slots)
        return self.is_few and small and not self.cells[-2].numbers

    @cached_property
    def cells(self) -> list[Cells]:
        """Of each slot, of padding, and of all trailers."""
        found = [Cells([], []) for _ in range(len(self.of.slots) + 2)]
        for at, (_, number, start, stop) in enumerate(self.contents):
            found[number].numbers.append(at)
            found[number].lengths.append(stop - start)
        return found

    @cached_property
    def spots(self) -> list[list[Spot]]:
        """Where each slot lies, and padding. One that is cut has a place before the first cut, one
        behind the last, and one for all slices between (one for each, if these have different
        lengths).
        """
        layout = self.of
        padding = Slot("", (layout.padded_numel - layout.numel,), layout.numel)
        slots = (*layout.slots, padding)
        cut: list[list[tuple[int, int, int]]] = [[] for _ in (*slots, "trailers")]
        for rank, number, start, stop in self.contents:
            cut[number].append((rank, start, stop))
        return [list(self._spots(*each)) for each in zip(slots, cut, strict=False)]

    def _spots(self, slot: Slot, cuts: list[tuple[int, int, int]]) -> Iterator[Spot]:
        n, rows = self.trailer, len(cuts) - 2
        if len(cuts) == 1 or (cuts and not n):
            offset = slot.offset + cuts[0][0] * n
            yield Spot(0, slot.numel, (slot.shape, slot.stride, offset))
            return
        between = self.of.bounds is None and rows > 1
        for rank, start, stop in (cuts[0], cuts[1], cuts[-1]) if between else cuts:
            offset = slot.offset + start + rank * n
            if between and rank == cuts[1][0]:
                length = stop - start
                place: Any = ((rows, length), (length + n, 1), offset)
                yield Spot(start, start + rows * length, place)
            else:
                yield Spot(start, stop, ((stop - start,), (1,), offset))


def megabytes(nbytes: int) -> str:
    """A size for messages: "12.3 MB"."""
    return f"{nbytes / 1e6:.1f} MB"
