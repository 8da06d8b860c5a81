"""Quantises parameters while they are read: each rank reads the elements whose codes it keeps, and ranks share the blocks' statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..core.layer_state import LayerState
from ..core.layout import Piece
from ..core.quantized_chunk import QuantizedSites
from ..quantized.codec import SLICE_NUMEL, Codec
from ..quantized.formats import Format

__all__: list[str] = []

Read = Callable[[int, Tensor], object]  # reads elements `[start, start + n)` of the flattened tensor into a tensor `[n]`


class Slot:
    """A quantised parameter's bytes, of which this rank keeps `kept` `[n]`, those from byte `low` on."""

    def __init__(self, sites: QuantizedSites, piece: Piece | None, kept: Tensor) -> None:
        self._format: Format = sites.format
        self._codec: Codec = sites.weight.codec
        self._shape, self._dtype = sites.weight.shape, sites.dtype
        self._low, self._kept = piece.start if piece is not None else 0, kept
        self._sections = {section.name: section for section in self._format.sections(self._shape)}
        self._codes_in_byte = -(-math.prod(self._shape) // max(1, self._sections["codes"].numel))
        self.statistics = torch.zeros(self._sections["scales"].numel, dtype=torch.float32, device=kept.device)

    @torch.no_grad()
    def quantize(self, read: Read) -> None:
        """Writes this rank's codes, and the statistics of their blocks. Blocks that are cut by its edges are read whole."""
        self._kept.zero_()
        start, stop = self._format.elements_between(self._shape, self._low, self._low + len(self._kept))
        if start >= stop:
            return
        low, last = self._codec.widened(self._shape, start, stop)
        while low < last:
            high = min(self._codec.widened(self._shape, low, min(low + SLICE_NUMEL, last))[1], last)
            values = torch.empty(high - low, dtype=self._dtype, device=self._kept.device)
            read(low, values)
            codes, statistics = self._codec.encode(values, self._shape, low)
            self._write("codes", codes, low // self._codes_in_byte)
            first = self._codec.blocks_before(self._shape, low)
            self.statistics[first : first + len(statistics)] = statistics
            low = high

    @torch.no_grad()
    def finish(self, communicator: Communicator) -> None:
        """Shares the statistics, and writes this rank's part of the scales. Every rank calls it."""
        if communicator.world_size > 1 and self.statistics.numel():
            communicator.all_reduce(self.statistics, maximum=True)  # a block that two ranks have has one statistic; no statistic is below 0
        for name, section in self._codec.scales(self.statistics).items():
            self._write(name, section, 0)

    def _write(self, name: str, values: Tensor, number: int) -> None:
        """Writes those bytes of `values`, a section's from its `number`-th on, that this rank keeps."""
        section, raw = self._sections[name], values.contiguous().view(torch.uint8)
        at = section.offset + number * section.dtype.itemsize - self._low
        first, last = max(at, 0), min(at + len(raw), len(self._kept))
        if first < last:
            self._kept[first:last] = raw[first - at : last - at]


def fill_quantized(state: LayerState, found: Mapping[int, Read], error: Exception | None) -> Exception | None:
    """Quantises the layer's parameters that `found` has, by id. Every rank calls it, also after an `error`, which it returns."""
    for sharded in state.parameters:
        sites, chunk = sharded.sites, sharded.chunk
        if not isinstance(sites, QuantizedSites) or (read := found.get(id(sites.parameter))) is None:
            continue
        slot = chunk.layout.slots[sharded.index]
        piece = next((piece for piece in chunk.layout.pieces(state.communicator.rank) if piece.slot is slot), None)
        filling = Slot(sites, piece, chunk.shard.data[piece.place] if piece is not None else chunk.shard.data[:0])
        try:
            if error is None:
                filling.quantize(read)
        except Exception as caught:  # the others wait for this rank's statistics
            error = caught
        filling.finish(state.communicator)
    return error
