"""Quantises parameters while they are read: each rank reads the elements whose codes it keeps, and
ranks share the blocks' statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from ..checkpoint.contents import piece_of
from ..checkpoint.lazy import Lazy
from ..comm.communicator import Communicator
from ..core.layer_state import LayerState
from ..core.layout import Piece
from ..faces.quantised import weight_of
from ..faces.recipes import QuantizedWeight
from ..quantized.codec import SLICE_NUMEL, Codec
from .index_maps import IndexMap, SliceReader, View

__all__: list[str] = []

# reads elements `[start, start + n)`, as they are stored, into a tensor `[n]`
Read = Callable[[int, Tensor], object]


class Quantizer:
    """A parameter's bytes, of which this rank keeps `kept` `[n]`, those from byte `low` on."""

    def __init__(self, weight: QuantizedWeight, piece: Piece | None, kept: Tensor) -> None:
        self._weight, self._shape, self._rows = weight, weight.shape, weight.rows
        self._codec: Codec = weight.codec
        self._low, self._kept = piece.start if piece is not None else 0, kept
        self._sections = {section.name: section for section in self._rows.sections}
        in_row = math.prod(self._rows.shape)
        self._codes_in_byte = -(-in_row // max(1, self._sections["codes"].numel))
        blocks = self._rows.count * self._sections["scales"].numel
        self._statistics = torch.zeros(blocks, dtype=torch.float32, device=kept.device)
        # blocks at this rank's edges, with zeros for what others read; and where they begin
        self._cut: list[tuple[int, Tensor]] = []

    @torch.no_grad()
    def quantize(self, read: Read) -> None:
        """Writes this rank's codes, but for blocks that its edges cut: they need all statistics."""
        self._kept.zero_()
        start, stop = self._weight.format.elements_between(
            self._shape, self._low, self._low + len(self._kept)
        )
        if start >= stop:
            return
        low, last = self._codec.widened(self._shape, start, stop)
        while low < last:
            high = min(self._codec.widened(self._shape, low, min(low + SLICE_NUMEL, last))[1], last)
            values = torch.zeros(high - low, dtype=self._weight.own_dtype, device=self._kept.device)
            read(max(low, start), values[max(low, start) - low : min(high, stop) - low])
            statistics = self._codec.statistics(values, self._shape, low)
            self._of_blocks(low, len(statistics)).copy_(statistics)
            if low < start or high > stop:
                self._cut.append((low, values))
            else:
                self._encode(low, values, statistics)
            low = high

    @torch.no_grad()
    def finish(self, communicator: Communicator) -> None:
        """Shares the statistics, and writes the codes that need them and this rank's part of the
        scales. Every rank calls it.
        """
        if communicator.world_size > 1 and self._statistics.numel():
            # a block's is the largest of its parts'
            communicator.all_reduce(self._statistics, maximum=True)
        for low, values in self._cut:
            count = len(self._codec.statistics(values, self._shape, low))
            self._encode(low, values, self._of_blocks(low, count))
        for name, section in self._codec.scales(self._statistics).items():
            self._write(name, self._rows.spread(name, section).reshape(-1), 0)

    def _of_blocks(self, low: int, count: int) -> Tensor:
        first = self._codec.blocks_before(self._shape, low)
        return self._statistics[first : first + count]

    def _encode(self, low: int, values: Tensor, statistics: Tensor) -> None:
        codes = self._codec.encode(values, self._shape, low, statistics)
        self._write("codes", codes, low // self._codes_in_byte)

    def _write(self, name: str, values: Tensor, number: int) -> None:
        """Writes what this rank keeps of `values`, a section's from its `number`-th on."""
        section = self._sections[name]
        while len(values):
            row, place = divmod(number, section.numel)
            raw = values[: section.numel - place].contiguous().view(torch.uint8)
            at = row * self._rows.nbytes + section.offset - self._low
            at += place * section.dtype.itemsize
            first, last = max(at, 0), min(at + len(raw), len(self._kept))
            if first < last:
                self._kept[first:last] = raw[first - at : last - at]
            values, number = values[section.numel - place :], number + section.numel - place


def fill_quantized(
    state: LayerState,
    reader: SliceReader,
    found: Mapping[int, IndexMap[Lazy]],
    error: Exception | None,
) -> Exception | None:
    """Quantises the layer's parameters that `found` has, by id. Every rank calls it, also after an
    `error`, which it returns.
    """
    for sharded in state.parameters:
        sites, chunk = sharded.sites, sharded.chunk
        weight, index_map = weight_of(sites), found.get(id(sites.parameter))
        if weight is None or index_map is None:
            continue
        if weight.codec.turns(weight.shape):
            index_map = View(index_map, index_map.blank().mT)
        piece, own = piece_of(sharded), chunk.shard.data
        filling = Quantizer(weight, piece, own[:0] if piece is None else own[piece.place])
        try:
            if error is None:
                filling.quantize(partial(reader.read, index_map))
        except Exception as caught:  # the others wait for this rank's statistics
            error = caught
        filling.finish(state.communicator)
    return error
