"""Tensors whose memory is a file. The kernel keeps in memory what is in use, and writes out the
rest.

Such memory does not count as the process's own (anonymous) memory. `rest` tells the kernel that a
tensor is not needed for now, and `read_ahead` that it will be soon. Both are advice: values are the
same, whenever a tensor is used.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import warnings
import weakref
from bisect import bisect, insort
from functools import partial

import torch
from torch import Tensor

from .nameless_file import GrowingFile
from .regions import Regions

__all__: list[str] = []

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.pwrite.restype = ctypes.c_ssize_t
_libc.pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong, ctypes.c_uint]
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # of madvise; Python 3.11 has no names for them
_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # of sync_file_range
# bytes; a disk's own limit is seldom lower, and the kernel leaves out what is above it
_READ_AHEAD = 1 << 17
_FAILED = ctypes.c_void_p(-1).value
_MAP_FIXED = 0x10  # of mmap


class MappedFiles:
    """Memory in a file without a name: each region is a part of it.

    (The C library maps it, because every `mmap.mmap` keeps a descriptor open, and there may be
    thousands of regions.)
    """

    def __init__(self, directory: str, file: GrowingFile | None = None) -> None:
        """`file`: one that others share, since there may be thousands of these objects, too."""
        self._mapped: list[_Mapped] = []  # sorted by address
        self._regions = Regions(partial(_map_more, file or GrowingFile(directory), self._mapped))
        self._directory = directory
        self._has_warned = False
        self._process = os.getpid()
        # Python keeps the function; it is small
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor with any values. Raises OSError, RuntimeError or ValueError if there is no
        room, or this process is a forked child.
        """
        self.check_process()
        return self._regions.empty(numel, dtype)

    def place(self, numel: int, dtype: torch.dtype, what: str) -> Tensor | None:
        """As `empty`. But if there is no room: None, the first time with a warning that `what`
        stays in memory. Other ranks go on.
        """
        try:
            return self.empty(numel, dtype)
        except (OSError, ValueError) as error:
            self._warn(what, error)
            return None

    def put(self, values: Tensor, what: str) -> Tensor | None:
        """A copy of 1-D values, or None, as for `place`. It is written by calls: stores would have
        to read, first, what lay there.
        """
        try:
            copy, values = self.empty(values.numel(), values.dtype), values.contiguous()
            if (pages := self._pages_of(copy)) is not None:
                descriptor, offset = pages[2].descriptor, pages[2].offset
                whole = values.nbytes - values.nbytes % mmap.PAGESIZE
                _write(descriptor, values.data_ptr(), whole, offset)
                if whole < values.nbytes:
                    rest = ctypes.create_string_buffer(
                        ctypes.string_at(values.data_ptr() + whole, values.nbytes - whole),
                        mmap.PAGESIZE,
                    )
                    _write(descriptor, ctypes.addressof(rest), mmap.PAGESIZE, offset + whole)
            return copy
        except (OSError, ValueError) as error:
            self._warn(what, error)
            return None

    def _warn(self, what: str, error: Exception) -> None:
        if not self._has_warned:
            warnings.warn(
                f"{what} stays in memory, because it can't be offloaded: {error}", stacklevel=3
            )
        self._has_warned = True

    def read_ahead(self, tensor: Tensor) -> None:
        """The kernel begins to read what of a dense tensor is on the disk alone. A tensor from
        elsewhere is left alone.

        Without it, first use reads megabytes around each page that is missing, of other tensors
        too.
        """
        pages = self._pages_of(tensor)
        if pages is not None and self.is_away(tensor):
            start, nbytes, _ = pages
            for done in range(0, nbytes, _READ_AHEAD):
                _libc.madvise(start + done, min(_READ_AHEAD, nbytes - done), mmap.MADV_WILLNEED)

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        """Reads a dense tensor into memory, so that its first use does not wait. Returns when that
        is done. For a thread beside compute. Raises OSError if it can't be read.
        """
        code = self._advise(tensor, _POPULATE_WRITE if to_write else _POPULATE_READ)
        # kernels before Linux 5.14 read it when it is used
        if code not in (0, errno.EINVAL, errno.ENOSYS):
            raise OSError(
                code,
                f"{tensor.nbytes} bytes of what is offloaded to {self._directory!r} can't be "
                f"read: {os.strerror(code)}",
            )

    def is_away(self, tensor: Tensor) -> bool:
        """Whether some of a dense tensor is on the disk alone: the kernel has needed its memory for
        something else.
        """
        if (pages := self._pages_of(tensor)) is None:
            return False
        start, nbytes, _ = pages
        here = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
        return not _libc.mincore(start, nbytes, here) and b"\0" in here.raw

    def rest(self, tensor: Tensor) -> None:
        """The pages of a dense tensor leave the process. The kernel may keep them, until it needs
        the memory for something else.
        """
        self._advise(tensor, mmap.MADV_DONTNEED)

    def rest_all(self) -> None:
        """All tensors rest."""
        for mapped in self._mapped:
            _libc.madvise(mapped.address, mapped.nbytes, mmap.MADV_DONTNEED)

    def write(self, tensor: Tensor, *, wait: bool) -> None:
        """What of a dense tensor has changed goes to the disk, so that the kernel can drop it when
        memory is short, and needn't wait. Raises OSError if it can't be written.
        """
        if (pages := self._pages_of(tensor)) is None:
            return
        start, nbytes, mapped = pages
        flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER if wait else _WRITE
        if _libc.sync_file_range(
            mapped.descriptor, mapped.offset + start - mapped.address, nbytes, flags
        ):
            code = ctypes.get_errno()
            # where there is no such call the kernel writes when it has to
            if code not in (errno.EINVAL, errno.ENOSYS, errno.ESPIPE):
                raise OSError(
                    code,
                    f"{nbytes} bytes of what is offloaded to {self._directory!r} can't be "
                    f"written: {os.strerror(code)}",
                )

    def check_process(self) -> None:
        """Raises RuntimeError if this is a forked child of the process whose files these are."""
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} was forked from process {self._process}, whose values "
                f"rest in {self._directory!r}: a forked child has no copy of them. "
                "Train, step, load and save "
                "in the process that has sharded the model, or start "
                'the other one with multiprocessing\'s "spawn" and shard a model of its own there'
            )

    def leave_to_parent(self) -> None:
        """In a forked child: what it writes from now on it alone sees. (What the parent writes, it
        may see.)
        """
        for mapped in self._mapped:
            flags, place = mmap.MAP_PRIVATE | _MAP_FIXED, mapped.address
            _map(mapped.descriptor, mapped.offset, mapped.nbytes, flags, place)

    def __contains__(self, tensor: Tensor) -> bool:
        return self._pages_of(tensor) is not None

    def _pages_of(self, tensor: Tensor) -> tuple[int, int, _Mapped] | None:
        """The address and the bytes of the pages of a tensor in one of the regions, and that
        region. None: it is in no region.
        """
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        at = bisect(self._mapped, start, key=_address_of) - 1
        if at < 0 or start == stop or stop > self._mapped[at].address + self._mapped[at].nbytes:
            return None
        start -= start % mmap.PAGESIZE
        return start, stop - start, self._mapped[at]

    def _advise(self, tensor: Tensor, advice: int) -> int:
        """Returns the system's number of an error, or 0."""
        # elsewhere MADV_DONTNEED would set memory to zero
        if (pages := self._pages_of(tensor)) is None:
            return 0
        return ctypes.get_errno() if _libc.madvise(pages[0], pages[1], advice) else 0


def _leave_to_parent(files: weakref.ref[MappedFiles]) -> None:
    if (found := files()) is not None:
        found.leave_to_parent()


def _write(descriptor: int, address: int, nbytes: int, offset: int) -> None:
    while nbytes > 0:
        count = _libc.pwrite(descriptor, address, nbytes, offset)
        if count < 0:
            code = ctypes.get_errno()
            raise OSError(code, f"{nbytes} bytes can't be written: {os.strerror(code)}")
        address, nbytes, offset = address + count, nbytes - count, offset + count


class _Mapped:
    """A part of a file, mapped."""

    def __init__(self, descriptor: int, offset: int, nbytes: int) -> None:
        self.descriptor, self.offset, self.nbytes = descriptor, offset, nbytes
        self.address = _map(descriptor, offset, nbytes, mmap.MAP_SHARED)
        # at exit, other threads may still read it
        weakref.finalize(self, _libc.munmap, self.address, nbytes).atexit = False


def _address_of(mapped: _Mapped) -> int:
    return mapped.address


def _map_more(file: GrowingFile, held: list[_Mapped], nbytes: int) -> _Mapped:
    mapped = _Mapped(*file.take(nbytes), nbytes)
    insort(held, mapped, key=_address_of)
    return mapped


def _map(descriptor: int, offset: int, nbytes: int, flags: int, address: int | None = None) -> int:
    found: int | None = _libc.mmap(
        address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, offset
    )
    if found is None or found == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{nbytes} bytes of a file can't be mapped: {os.strerror(code)}")
    return found
