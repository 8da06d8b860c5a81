"""Reads slices of the model's tensors from files in which they may be cut, joined or transposed."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint.safetensors_files import SafetensorsFiles, Stored
from .index_maps import IndexMap

__all__: list[str] = []

_AT_ONCE = 1 << 20  # elements that are looked up together
# if a span has this many times the elements that are wanted, the whole tensor is read instead, once
_WASTE = 4


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
        stop = start + target.numel()
        if index_map.is_by_ranges:
            for extent in index_map.extents(start, stop):
                self._files.read(
                    extent.source,
                    extent.at,
                    target[extent.start - start : extent.start - start + extent.length],
                )
            return
        for low in range(start, stop, _AT_ONCE):
            numbers, at = index_map.locate(
                torch.arange(low, min(low + _AT_ONCE, stop), dtype=torch.int64)
            )
            found = torch.empty(len(at), dtype=target.dtype)
            for number, source in enumerate(index_map.sources):
                if not (mine := numbers == number).any():
                    continue
                first, values = self._span_of(source, at[mine])
                found[mine] = values[at[mine] - first].to(found.dtype)
            target[low - start : low - start + len(at)].copy_(found)

    def _span_of(self, stored: Stored, wanted: Tensor) -> tuple[int, Tensor]:
        first, last = int(wanted.min()), int(wanted.max())
        if self._span is not None:
            source, begin, values = self._span
            if source is stored and begin <= first and last < begin + len(values):
                return begin, values
        if last - first >= _WASTE * len(wanted):
            first, last = 0, stored.numel - 1
        self._span = None  # its memory is free before the next span takes some
        values = torch.empty(last - first + 1, dtype=stored.dtype)
        self._files.read(stored, first, values)
        self._span = stored, first, values
        return first, values
