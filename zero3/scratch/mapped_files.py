"""Tensors whose memory is a file. The kernel keeps in memory what is in use, and writes out the rest.

Such memory does not count as the process's own (anonymous) memory. `rest` tells the kernel that a tensor is not needed for now,
and `read_ahead` that it will be soon. Both are advice: values are the same, whenever a tensor is used.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
import weakref
from bisect import bisect, insort

import torch
from torch import Tensor

from .nameless_file import room_on_disk
from .regions import Region, Regions

__all__: list[str] = []

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise; Python 3.11 has no names for them
_FAILED = ctypes.c_void_p(-1).value


class MappedFiles(Regions):
    """Memory in files without names: each region is a file.

    (The C library maps it, because a `mmap.mmap` keeps a descriptor open, and there may be thousands of regions.)
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory
        self._has_warned = False
        self._places: list[tuple[int, int]] = []  # (address, bytes) of regions, sorted

    def _new_region(self, nbytes: int) -> Region:
        with room_on_disk(self._directory, nbytes) as file:
            region = _Mapped(file.fileno(), nbytes)
        insort(self._places, (region.address, nbytes))
        return region

    def place(self, numel: int, dtype: torch.dtype, what: str) -> Tensor | None:
        """As `empty`. But if there is no room: None, the first time with a warning that `what` stays in memory. Other ranks go on."""
        try:
            return self.empty(numel, dtype)
        except (OSError, ValueError) as error:
            if not self._has_warned:
                warnings.warn(f"{what} stays in memory, because it can't be offloaded: {error}", stacklevel=2)
            self._has_warned = True
            return None

    def read_ahead(self, tensor: Tensor) -> None:
        """The kernel begins to read what of a dense tensor is on the disk alone. A tensor from elsewhere is left alone."""
        self._advise(tensor, mmap.MADV_WILLNEED)

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        """Reads a dense tensor into memory, so that its first use does not wait. Returns when that is done. For a thread beside compute.

        Raises:
            OSError: It can't be read.
        """
        code = self._advise(tensor, _POPULATE_WRITE if to_write else _POPULATE_READ)
        if code not in (0, errno.EINVAL, errno.ENOSYS):  # kernels before Linux 5.14 read it when it is used
            raise OSError(code, f"{tensor.nbytes} bytes of what is offloaded to {self._directory!r} can't be read: {os.strerror(code)}")

    def rest(self, tensor: Tensor) -> None:
        """The pages of a dense tensor leave the process. The kernel may keep them, until it needs the memory for something else."""
        self._advise(tensor, mmap.MADV_DONTNEED)

    def rest_all(self) -> None:
        """All tensors rest."""
        for address, nbytes in self._places:
            _libc.madvise(address, nbytes, mmap.MADV_DONTNEED)

    def __contains__(self, tensor: Tensor) -> bool:
        return self._span_of(tensor) is not None

    def _span_of(self, tensor: Tensor) -> tuple[int, int] | None:
        """The first and the last address of a tensor in one of the files, if it is in one."""
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        at = bisect(self._places, (start, self.nbytes)) - 1
        if at < 0 or start == stop:
            return None
        address, nbytes = self._places[at]
        return (start, stop) if stop <= address + nbytes else None

    def _advise(self, tensor: Tensor, advice: int) -> int:
        """Returns the system's number of an error, or 0."""
        if (span := self._span_of(tensor)) is None:  # elsewhere MADV_DONTNEED would set memory to zero
            return 0
        start = span[0] - span[0] % mmap.PAGESIZE
        return ctypes.get_errno() if _libc.madvise(start, span[1] - start, advice) else 0


class _Mapped:
    """A file, mapped."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        access, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        self.address = _libc.mmap(None, nbytes, access, shared, descriptor, 0)
        if self.address in (None, _FAILED):
            code = ctypes.get_errno()
            raise OSError(code, f"{nbytes} bytes of a file can't be mapped: {os.strerror(code)}")
        weakref.finalize(self, _libc.munmap, self.address, nbytes).atexit = False  # at exit, other threads may still read it
