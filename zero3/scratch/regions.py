"""Memory that is used again: a tensor takes a region, and gives it back when nobody holds the
tensor or a view of it any more.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__: list[str] = []


class Region(Protocol):
    """Memory of some whole pages, as long as the object lives."""

    address: int


class Regions:
    """Gives out memory of one kind. A region is for one tensor. It lives as long as this object, or
    the tensor.
    """

    def __init__(self, new: Callable[[int], Region]) -> None:
        """`new`: makes a region of so many bytes."""
        self._new = new
        self._free: defaultdict[int, list[Region]] = defaultdict(list)  # by their bytes

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of the host with any values. Raises OSError, RuntimeError or ValueError if
        there is no such memory left, or none to be had.
        """
        if not numel:
            return torch.empty(0, dtype=dtype)
        nbytes = -(-numel * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        free = self._free[nbytes]
        region = free.pop() if free else self._new(nbytes)
        memory = (ctypes.c_char * (numel * dtype.itemsize)).from_address(region.address)
        # the tensor's storage holds `memory`
        weakref.finalize(memory, free.append, region).atexit = False
        return torch.frombuffer(memory, dtype=dtype)


def pinned_nbytes(nbytes: int) -> int:
    """What torch takes for so many bytes of pinned memory: whole pages are asked for here, and
    torch rounds up to a power of two.
    """
    pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    return 1 << (pages - 1).bit_length() if nbytes else 0


class PinnedRegions(Regions):
    """Pinned memory of the host."""

    def __init__(self) -> None:
        super().__init__(_PinnedBlock)


class _PinnedBlock:
    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        self.address = self._memory.data_ptr()
