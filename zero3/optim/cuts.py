"""Where chunks are cut for optimizers that do more than treat each element by itself.

A whole parameter lies on one rank. An aligned one is cut so that a state quantised in blocks of n
elements has the same blocks as that of the uncut parameter. Integers only, no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from ..core.layout import ChunkLayout, Slot, side_by_side

__all__: list[str] = []

Shape = tuple[str, tuple[int, ...]]

# Optimizers quantise the state of a parameter only if it has enough elements: 4096 in bitsandbytes
# and torchao, 16 of their longest blocks. A shorter piece would keep another state.
SHORTEST_IN_BLOCKS = 16


def dealt(shapes: Iterable[Shape], owners: Sequence[int], world_size: int) -> ChunkLayout:
    """Each slot is whole in the chunk of one rank, its owner. Who owns nothing has an empty one."""
    own = _of_each(owners, shapes, world_size)
    ends = accumulate(sum(math.prod(shape) for _, shape in items) for items in own)
    slots = side_by_side(item for items in own for item in items)
    return ChunkLayout(slots, world_size, (0, *ends))


def _of_each(owners: Sequence[int], items: Iterable[Shape], world_size: int) -> list[list[Shape]]:
    owned = list(zip(owners, items, strict=True))
    return [[item for owner, item in owned if owner == rank] for rank in range(world_size)]


class _Grain(NamedTuple):
    """A slot may be cut at multiples of `step` elements, into pieces of at least `shortest`."""

    step: int
    shortest: int

    @classmethod
    def of(cls, numel: int, align: int) -> _Grain:
        if not align:
            return cls(1, 0)
        return cls(align, numel if numel % align else SHORTEST_IN_BLOCKS * align)

    def cuts(self, numel: int) -> bool:
        return 2 * self.shortest <= numel or not self.shortest


def are_blocks(start: int, stop: int, numel: int, align: int) -> bool:
    """Whether elements `[start, stop)` of a parameter of `numel` have the blocks that it has."""
    step, shortest = _Grain.of(numel, align)
    return (start, stop) == (0, numel) or (
        stop - start >= shortest and not start % step and (stop == numel or not stop % step)
    )


def aligned(
    shapes: Iterable[tuple[str, tuple[int, ...], int]], world_size: int, loads: Sequence[int]
) -> ChunkLayout:
    """A layout that cuts each slot as optimizers that quantise in blocks can bear it.

    `shapes`: name, shape and n of each slot. It is cut only at multiples of n, into pieces of at
    least 16 n elements, and not at all if its length is no multiple. With an n of 0 it is cut
    anywhere. `loads`: what each rank has already. What is not cut goes to whoever has least.
    """
    named = [((name, tuple(shape)), math.prod(shape), align) for name, shape, align in shapes]
    grains = {item[0]: _Grain.of(numel, align) for item, numel, align in named}
    lengths = {item: numel for item, numel, _ in named}
    uncut = [item for item, numel, _ in named if not grains[item[0]].cuts(numel)]
    owners = deal([lengths[item] for item in uncut], world_size, loads)
    own = _of_each(owners, uncut, world_size)
    waiting = [item for item, numel, _ in named if grains[item[0]].cuts(numel)]
    fixed = [sum(lengths[item] for item in items) for items in own]
    ends = list(accumulate(_levelled(fixed, sum(lengths[item] for item in waiting))))
    line: list[Shape] = []
    at = 0
    for end, items in zip(ends, own, strict=True):
        line += items
        at += sum(lengths[item] for item in items)
        while waiting and at < end:
            line.append(waiting.pop(0))
            at += lengths[line[-1]]
    slots = side_by_side(line + waiting)
    bounds = [0]
    for end in ends[:-1]:
        bounds.append(_nearest_cut(slots, grains, end, bounds[-1]))
    return ChunkLayout(slots, world_size, (*bounds, ends[-1]))


def _levelled(fixed: Sequence[int], more: int) -> list[int]:
    """What each rank has after `more` elements went to those with least."""
    ranks = sorted(range(len(fixed)), key=fixed.__getitem__)
    found = list(fixed)
    for count in range(len(ranks), 0, -1):
        level, over = divmod(more + sum(fixed[rank] for rank in ranks[:count]), count)
        if level >= fixed[ranks[count - 1]]:
            for place, rank in enumerate(ranks[:count]):
                found[rank] = level + (place < over)
            break
    return found


def _nearest_cut(slots: Sequence[Slot], grains: dict[str, _Grain], wanted: int, last: int) -> int:
    """The place nearest to `wanted`, and not before the cut at `last`, at which a cut may lie."""
    slot = next((slot for slot in slots if wanted < slot.stop), None)
    if slot is None:
        return wanted
    step, shortest = grains[slot.name]
    begins = max(0, last - slot.offset)  # of the piece that this cut would end
    low = -(-(begins + shortest) // step) * step
    high = (slot.numel - shortest) // step * step
    places = {slot.offset, slot.stop}
    if low <= high:
        nearest = round((wanted - slot.offset) / step) * step
        places.add(slot.offset + min(max(nearest, low), high))
    return min((place for place in places if place >= last), key=lambda at: (abs(at - wanted), at))


def deal(sizes: Sequence[int], world_size: int, loads: Sequence[int] | None = None) -> list[int]:
    """Chooses an owner for each of `sizes` so that ranks own about the same. The largest comes
    first; the rank with least gets it. `loads`: what each rank owns already.
    """
    owned = list(loads or [0] * world_size)
    owners = [0] * len(sizes)
    # a stable sort, so the result is the same on all ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = owned.index(min(owned))
        owned[owners[index]] += sizes[index]
    return owners
