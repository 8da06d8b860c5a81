"""A file without a name, for tensors that rest on a disk for a while. It vanishes with the process, however that ends."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from threading import Lock
from weakref import finalize

from torch import Tensor

from ..checkpoint.file_operations import write_at
from ..checkpoint.safetensors_files import bytes_of
from ..scratch.nameless_file import nameless_file

__all__: list[str] = []


class ScratchFile:
    """Places of a file, each for one tensor's bytes. A place that is given back is used again by a tensor of the same size."""

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
                raise RuntimeError(f"the file of offloaded tensors ends at {place}: something else has cut it short")
            rest, place = rest[count:], place + count


def _close(threads: ThreadPoolExecutor, file: FileIO) -> None:
    threads.shutdown(wait=False)  # they have nothing to do any more: a job holds the ScratchFile
    file.close()
