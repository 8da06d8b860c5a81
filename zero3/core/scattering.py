"""Rank 0's parameters into everybody's chunks, from where they lie: never side by side in a buffer of their own."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.streams import Pending
from .layout import ChunkLayout

__all__: list[str] = []

_SMALL_NUMEL = 2**15  # parameters below it travel with their neighbours: a message costs more than a copy of them
_LARGE_NUMEL = 2**18  # no slice is longer, so that what is under way stays small
_UNDER_WAY = 2  # scatters at a time, so that copies of small parameters don't add up

Values = Callable[[int], Tensor]  # of the slot of this number, in its shape, of any strides and device


@torch.no_grad()
def scatter_parameters(shard: Tensor, layout: ChunkLayout, communicator: Communicator, values: Values | None) -> None:
    """Fills `shard` `[S]` on every rank with its slice of the slots' `values`, which rank 0 alone passes; padding is zero.

    Every chunk is cut where, on any rank, one run of the flat buffer ends and the next begins. So what a rank gets at a time
    lies in one run, which is one large parameter, and then it is sent from there, or a few small ones.

     runs     | a        | b    | c          |
     rank 0   | a        | b |
     rank 1                  | b | c         |
     cuts     |   |      |   |                   three scatters, of (a, b), (a, c), (b, c)
    """
    size, ranks = layout.shard_numel, range(communicator.world_size)
    cuts = sorted({border % size for border in _borders(layout)} | {*range(0, size, _LARGE_NUMEL), size}) if size else []
    source = _Source(layout, values, shard) if values is not None else None
    under_way: deque[Pending] = deque()
    for low, high in pairwise(cuts):
        slices = [source.part(rank * size + low, rank * size + high) for rank in ranks] if source is not None else None
        under_way.append(communicator.scatter(shard[low:high], slices))
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().wait()
    for pending in under_way:
        pending.wait()


def _borders(layout: ChunkLayout) -> Iterator[int]:
    """Where runs begin: at every large slot, and among small ones as soon as enough have come together. Padding is as a small slot."""
    gathered = _SMALL_NUMEL
    for slot in layout.slots:
        if max(slot.numel, gathered) >= _SMALL_NUMEL:
            yield slot.offset
            gathered = 0
        gathered += slot.numel
    if gathered >= _SMALL_NUMEL:
        yield layout.numel


class _Source:
    """The flat buffer that is not there."""

    def __init__(self, layout: ChunkLayout, values: Values, like: Tensor) -> None:
        self._layout = layout
        self._values = values
        self._like = like
        self._offsets = [slot.offset for slot in layout.slots]
        self._flat: dict[int, Tensor] = {}  # one copy of each that is not contiguous, however many parts it has

    def part(self, start: int, stop: int) -> Tensor:
        """Elements `[start, stop)`: a view, if they belong to one parameter on the chunk's device."""
        pieces, index = [], max(0, bisect_right(self._offsets, start) - 1)
        for number, slot in enumerate(self._layout.slots[index:], index):
            if slot.offset >= stop:
                break
            pieces.append(self._flattened(number)[max(0, start - slot.offset) : stop - slot.offset])
        if stop > self._layout.numel:
            pieces.append(self._like.new_zeros(stop - max(start, self._layout.numel)))
        pieces = [piece.to(self._like.device) for piece in pieces if piece.numel()]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _flattened(self, number: int) -> Tensor:
        if number not in self._flat:
            self._flat[number] = self._values(number).detach().contiguous().view(-1)
        return self._flat[number]
