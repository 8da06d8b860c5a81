"""Files without a name. They vanish with the process, however that ends."""

from __future__ import annotations

import os
import tempfile
from io import FileIO
from weakref import finalize

__all__: list[str] = []


def nameless_file(directory: str) -> FileIO:
    """Raises ValueError if `directory` is none, or no file can be made there."""
    try:
        if not os.path.isdir(directory):
            raise NotADirectoryError("it is no directory")
        return tempfile.TemporaryFile(dir=directory, buffering=0)
    except OSError as error:
        raise ValueError(
            f"{directory!r} can't hold what is offloaded: {error}. Name a directory, on a local "
            "disk"
        ) from error


def room_on_disk(directory: str, nbytes: int) -> FileIO:
    """A file of that many bytes, which it has on the disk: a write to a mapped file on a full disk
    would end the process. Raises OSError if the disk is full, and ValueError as `nameless_file`.
    """
    file = nameless_file(directory)
    try:
        _extend(file, directory, 0, nbytes)
    except OSError:
        file.close()
        raise
    return file


class GrowingFile:
    """A file without a name, which is made when its first bytes are taken."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file: FileIO | None = None
        self._end = 0

    def take(self, nbytes: int) -> tuple[int, int]:
        """Takes so many more bytes on the disk. Returns the file's descriptor, and where in it they
        begin. Raises OSError or ValueError as for `room_on_disk`.
        """
        if self._file is None:
            self._file = nameless_file(self._directory)
            finalize(self, self._file.close)
        _extend(self._file, self._directory, self._end, nbytes)
        self._end += nbytes
        return self._file.fileno(), self._end - nbytes


def _extend(file: FileIO, directory: str, end: int, nbytes: int) -> None:
    try:
        if nbytes:
            os.posix_fallocate(file.fileno(), end, nbytes)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{directory!r} has no room for {nbytes} more bytes of what is offloaded: "
            f"{error.strerror}",
        ) from error
