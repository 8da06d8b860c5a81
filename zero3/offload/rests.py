"""Where one activation rests, in host memory or in a file: the way there, and the way back."""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from io import FileIO
from threading import Lock
from weakref import finalize

import torch
from torch import Tensor

from ..checkpoint.file_operations import write_at
from ..checkpoint.lazy import bytes_of
from ..comm.streams import Done, Lane, OnHost, Pending, has_streams
from ..scratch.nameless_file import nameless_file

__all__: list[str] = []


class InHostMemory:
    """A copy of a flat, dense tensor of an accelerator, in pinned memory of the host. The host
    never waits.
    """

    def __init__(self, flat: Tensor, lane: Lane) -> None:
        self._lane, self._device = lane, flat.device
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        self._busy = flat  # what the lane reads or writes until the mark
        with lane.issue():
            self._host.copy_(flat, non_blocking=True)
            self._mark: Pending | None = lane.complete(Done())

    def _settle(self) -> Tensor:
        if self._mark is not None:
            self._mark.wait()
        busy, self._busy, self._mark = self._busy, self._host, None
        return busy

    def left(self) -> bool:
        """Whether the tensor may be freed now. (If so, compute comes after the copy.)"""
        self._settle()
        return True

    def come(self) -> None:
        """Begins the way back."""
        self._busy = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
        with self._lane.issue():
            self._busy.copy_(self._host, non_blocking=True)
            self._mark = self._lane.complete(Done())

    def arrived(self) -> Tensor:
        """The tensor, flat, after `come`. The compute stream may use it."""
        return self._settle()

    def __del__(self) -> None:
        # else compute would use the memory again before the lane has finished with it
        self._settle()


class ScratchFile:
    """Places of a file without a name, each for one tensor. One that is given back is used again by
    a tensor of the same size.
    """

    def __init__(self, directory: str) -> None:
        """
        Raises:
            ValueError: `directory` is none, or no file can be made there.
        """
        self._file = nameless_file(directory)
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # sizes -> places
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="zero3-offload")
        finalize(self, _close, self._threads, self._file)
        self._lock = Lock()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Runs `job` in a thread of the file's."""
        return self._threads.submit(job)

    def place(self, nbytes: int) -> int:
        with self._lock:
            if free := self._free[nbytes]:
                return free.pop()
            self._end += nbytes
            return self._end - nbytes

    def give_back(self, place: int, nbytes: int) -> None:
        self._free[nbytes].append(place)

    def write(self, place: int, tensor: Tensor) -> None:
        """`tensor` is dense: its elements fill its memory without gaps."""
        write_at(self._file, place, bytes_of(tensor))

    def read(self, place: int, into: Tensor) -> None:
        rest = bytes_of(into)
        while rest:
            count = os.preadv(self._file.fileno(), [rest], place)
            if not count:
                raise RuntimeError(
                    f"the file of offloaded tensors ends at {place}: something else has cut it "
                    "short"
                )
            rest, place = rest[count:], place + count


def _close(threads: ThreadPoolExecutor, file: FileIO) -> None:
    threads.shutdown(wait=False)  # they have nothing to do any more: a job holds the ScratchFile
    file.close()


class InScratchFile:
    """As `InHostMemory`, in a file, written and read by the file's threads. A tensor of an
    accelerator passes through pinned memory of the host.
    """

    def __init__(self, file: ScratchFile, flat: Tensor, lane: Lane) -> None:
        self._file, self._device, self._nbytes = file, flat.device, flat.nbytes
        self._place: int | None = None
        self._host = torch.empty(0)  # on the way back
        # the tensor, its copy, and the end of copying
        self._passing: tuple[Tensor, OnHost, Pending] | None = None
        if has_streams(flat.device):
            with lane.issue():
                self._passing = (flat, OnHost(flat), lane.complete(Done()))
        else:
            self._job = file.submit(partial(self._write, flat))

    def _write(self, host: Tensor) -> None:
        place = self._file.place(self._nbytes)
        try:
            self._file.write(place, host)
        except OSError:
            self._file.give_back(place, self._nbytes)
            raise
        self._place = place

    def _settle(self) -> OnHost | None:
        if self._passing is None:
            return None
        _, copy, mark = self._passing
        mark.wait()
        self._passing = None
        return copy

    def left(self) -> bool:
        """For a tensor of an accelerator, the host waits for its copy. So little pinned memory is
        in use at any time.
        """
        if (copy := self._settle()) is not None:
            host = copy.tensor()
            self._job = self._file.submit(partial(self._write, host))
        try:
            self._job.result()
        except OSError as error:
            warnings.warn(
                f"activations stay in memory, because they can't be offloaded: {error}",
                stacklevel=2,
            )
        return self._place is not None

    def come(self) -> None:
        self._host = torch.empty(
            self._nbytes, dtype=torch.uint8, pin_memory=has_streams(self._device)
        )
        self._job = self._file.submit(partial(self._file.read, self._place or 0, self._host))

    def arrived(self) -> Tensor:
        self._job.result()
        host, self._host = self._host, torch.empty(0)
        return host.to(self._device, non_blocking=True)

    def __del__(self) -> None:
        self._settle()
        if self._place is not None:
            self._file.give_back(self._place, self._nbytes)


Rest = InHostMemory | InScratchFile
