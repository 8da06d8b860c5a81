"""Chunks and gradients on the host, in pinned memory. The device reads and writes copies.

fetch      the chunk is copied into its slice of the full buffer, on the fetch lane, and
           gathered from there
backup     the gradient's slice is copied to the host, on the backup lane
landing    the host waits for that copy, and makes it the chunk's gradient, or adds it to that
writing    the host waits for the copy of the fetch: at the end of a backward, or of a forward
           without gradients. Between a forward with gradients and its backward the host goes
           on, and whoever asks for a chunk's values there waits (`WatchedParameter`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.streams import Fence, fence
from ..core.chunk import Chunk
from ..scratch.regions import PinnedRegions, pinned_nbytes
from .resting import WatchedParameter, watch_values

__all__: list[str] = []


class Pinned:
    """Pinned memory, for an accelerator, which copies while the host goes on."""

    name = "host memory"
    far = rests = True
    at_once = False  # gradients land at the end of a backward

    def __init__(self) -> None:
        regions = PinnedRegions()
        self.allocate = self.to_copy_into = regions.empty
        self._read: Fence | None = None  # the end of the last copy to the device
        self._watched: list[nn.Parameter] = []

    def taken(self, nbytes: int) -> int:
        return pinned_nbytes(nbytes)

    def belong_to(self, chunk: Chunk) -> None:
        return None

    def reserve(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        _ = [self.allocate(numel, dtype) for dtype in dtypes]

    def another(self, values: Tensor) -> Tensor:
        return self.allocate(values.numel(), values.dtype).copy_(values)

    def lend(self, values: Tensor, into: Tensor | None) -> Tensor:
        if into is None:
            return values
        if into.numel():
            into.copy_(values, non_blocking=True)
            self._read = fence(into.device)
        return into

    def settle(self, chunk: Chunk, recent: list[Any] | None, *, before_backward: bool) -> None:
        if self._read is None:
            return
        if before_backward:
            self._watched = watch_values(chunk, self._read.synchronize)
        else:
            read, self._read = self._read, None
            read.synchronize()

    def go_on(self) -> None:
        """A forward or a backward reads chunks itself, and its end settles them."""
        for parameter in self._watched:
            if isinstance(parameter, WatchedParameter):
                parameter.as_usual()
        self._watched = []

    def soon(self, chunk: Chunk) -> None:
        return None

    def rest(self, values: Tensor) -> None:
        return None

    def check_process(self) -> None:
        return None
