"""Rank 0's parameters into everybody's chunks, from where they lie: never side by side in a buffer of their own."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import groupby, pairwise

import torch
from torch import Tensor

from .collectives import Communicator
from .layout import ChunkLayout

__all__: list[str] = []

_SMALL_NUMEL = 2**15  # neighbours below this are copied together: a message costs more than a copy of them

Values = Callable[[int], Tensor]  # of the slot number so-and-so, in its shape, of any strides and device


@torch.no_grad()
def scatter_parameters(shard: Tensor, layout: ChunkLayout, communicator: Communicator, values: Values | None) -> None:
    """Fills `shard` `[S]` on every rank with its slice of the slots' `values`, which rank 0 alone passes; padding is zero.

    The chunk is cut wherever, on any rank, one run of the flat buffer ends and the next begins. So a rank's part of each cut
    lies in one tensor, and what is sent is a view of it.

     flat buffer  | a       | b   | c         |      runs a, b, c; 2 ranks
     rank 0       | a    ...|.. b |
     rank 1                       | c  ...    |
     cuts         |         |     |                  three scatters: (a, c), (b, c)
    """
    runs = _runs(layout)
    borders = [layout.slots[run[0]].offset for run in runs] + [layout.numel]  # the last is where padding begins
    flat = _flattened(shard, layout, runs, values) if values is not None else None

    def part(start: int, stop: int) -> Tensor:
        number = bisect_right(borders, start) - 1
        return flat[number][start - borders[number] : stop - borders[number]].to(shard.device)  # type: ignore[index]

    size, ranks = layout.shard_numel, range(communicator.world_size)
    cuts = sorted({border % size for border in borders} | {0, size}) if size else []
    under_way = [
        communicator.scatter(shard[low:high], [part(r * size + low, r * size + high) for r in ranks] if flat is not None else None)
        for low, high in pairwise(cuts)
    ]
    for pending in under_way:
        pending.wait()


def _runs(layout: ChunkLayout) -> list[list[int]]:
    """Slots that travel together: a large one by itself, small ones with their small neighbours."""
    large = [slot.numel >= _SMALL_NUMEL for slot in layout.slots]
    return [list(run) for _, run in groupby(range(len(large)), lambda index: index if large[index] else -1)]


def _flattened(shard: Tensor, layout: ChunkLayout, runs: list[list[int]], values: Values) -> list[Tensor]:
    """One 1-D tensor a run, and the padding. A contiguous parameter that is a run is not copied."""
    flat = [[values(index).detach().reshape(-1) for index in run] for run in runs]
    padding = shard.new_zeros(layout.padded_numel - layout.numel)
    return [run[0] if len(run) == 1 else torch.cat(run) for run in flat] + [padding]
