"""Scatters rank 0's parameters into the chunks of all ranks, without a full buffer."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.streams import Pending
from ..core.layout import ChunkLayout

__all__: list[str] = []

# smaller parameters are sent together: one more message costs more than a copy of them
_SMALL_NUMEL = 2**15
_LARGE_NUMEL = 2**18  # the longest slice of one scatter, so that transfers take little memory
_UNDER_WAY = 2  # scatters at the same time, so that few copies of small parameters exist

# slot number -> the slot's values in its shape, with any strides, on any device
Values = Callable[[int], Tensor]


@torch.no_grad()
def scatter_parameters(
    shard: Tensor, layout: ChunkLayout, communicator: Communicator, values: Values | None
) -> None:
    """Fills `shard` `[S]` on every rank with its slice of the flat parameters. Only rank 0 passes
    `values`. Padding is zero.

    A run is one large parameter, or a few small ones. All chunks are cut at the same positions, so
    that no slice contains the border of two runs. So a slice of a large parameter is a view of it,
    and needs no copy.

     runs     | a        | b    | c          |
     rank 0   | a        | b |
     rank 1                  | b | c         |
     cuts     |   |      |   |                   three scatters, of (a, b), (a, c), (b, c)
    """
    if layout.bounds is not None:
        _scatter_dealt(shard, layout, communicator, values)
        return
    size, ranks = layout.shard_numel, range(communicator.shards)
    cuts = (
        sorted(
            {border % size for border in _borders(layout)} | {*range(0, size, _LARGE_NUMEL), size}
        )
        if size
        else []
    )
    source = _Source(layout, values, shard) if values is not None else None
    under_way: deque[Pending] = deque()
    for low, high in pairwise(cuts):
        slices = (
            [source.part(rank * size + low, rank * size + high) for rank in ranks]
            if source is not None
            else None
        )
        under_way.append(communicator.scatter(shard[low:high], slices))
        if len(under_way) == _UNDER_WAY:
            under_way.popleft().wait()
    for pending in under_way:
        pending.wait()


def _scatter_dealt(
    shard: Tensor, layout: ChunkLayout, communicator: Communicator, values: Values | None
) -> None:
    slices = None
    if values is not None:
        flat = _Source(layout, values, shard)
        slices = [flat.part(*layout.chunk_range(index)) for index in range(layout.world_size)]
    communicator.scatter(shard, slices, layout.bounds).wait()


def _borders(layout: ChunkLayout) -> Iterator[int]:
    """The starts of runs: every large slot, and small slots whenever enough of them are together.
    Padding counts as a small slot.
    """
    gathered = _SMALL_NUMEL
    for slot in layout.slots:
        if max(slot.numel, gathered) >= _SMALL_NUMEL:
            yield slot.offset
            gathered = 0
        gathered += slot.numel
    if gathered >= _SMALL_NUMEL:
        yield layout.numel


class _Source:
    """Reads parts of the flat parameters from the parameters themselves, as if they were one flat
    buffer.
    """

    def __init__(self, layout: ChunkLayout, values: Values, like: Tensor) -> None:
        self._layout = layout
        self._values = values
        self._like = like
        self._offsets = [slot.offset for slot in layout.slots]
        # slot number -> its values, 1-D; a parameter that is not contiguous is copied once
        self._flat: dict[int, Tensor] = {}

    def part(self, start: int, stop: int) -> Tensor:
        """Elements `[start, stop)` of the flat parameters. It is a view if they belong to one
        parameter on the chunk's device.
        """
        pieces, index = [], max(0, bisect_right(self._offsets, start) - 1)
        for number, slot in enumerate(self._layout.slots[index:], index):
            if slot.offset >= stop:
                break
            pieces.append(self._flattened(number)[max(0, start - slot.offset) : stop - slot.offset])
        if stop > self._layout.numel:
            pieces.append(self._like.new_zeros(stop - max(start, self._layout.numel)))
        pieces = [piece.to(self._like.device) for piece in pieces if piece.numel()]
        if not pieces:
            return self._like.new_empty(0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _flattened(self, number: int) -> Tensor:
        if number not in self._flat:
            self._flat[number] = self._values(number).detach().contiguous().view(-1)
        return self._flat[number]
