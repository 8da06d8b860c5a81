"""Reads slices of the model's tensors from files in which they may be cut, joined or transposed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint.safetensors_files import SafetensorsFiles, Stored
from ..core.layout import Piece
from ..core.parameters import ShardedParameter
from .index_maps import IndexMap

__all__: list[str] = []

# if a span has this many times the elements that are wanted, the whole tensor is read instead, once
_WASTE = 4


def piece_of(sharded: ShardedParameter) -> Piece | None:
    """What this rank's chunk holds of the parameter. None: nothing."""
    slot = sharded.chunk.layout.slots[sharded.index]
    return next((piece for piece in sharded.chunk.pieces if piece.slot is slot), None)


class SliceReader:
    """Reads ranges if elements lie side by side, and otherwise through a buffer that holds a span
    of one stored tensor, or all of it.
    """

    def __init__(self, files: SafetensorsFiles) -> None:
        self._files = files
        # the last span: its tensor, its first element, its values
        self._span: tuple[Stored, int, Tensor] | None = None

    def read(self, index_map: IndexMap[Stored], start: int, target: Tensor) -> None:
        """Reads elements `[start, start + n)` of the flattened tensor into `target` `[n]`,
        converted to its dtype and device.
        """
        index_map.fill(target, start, self._files.read, self._look_up)

    def _look_up(self, stored: Stored, wanted: Tensor) -> Tensor:
        first, last = int(wanted.min()), int(wanted.max())
        if self._span is not None:
            source, begin, values = self._span
            if source is stored and begin <= first and last < begin + len(values):
                return values[wanted - begin]
        if last - first >= _WASTE * len(wanted):
            first, last = 0, stored.numel - 1
        self._span = None  # its memory is free before the next span takes some
        values = torch.empty(last - first + 1, dtype=stored.dtype)
        self._files.read(stored, first, values)
        self._span = stored, first, values
        return values[wanted - first]
