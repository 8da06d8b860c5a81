"""Files without a name. They vanish with the process, however that ends."""

from __future__ import annotations

import os
import tempfile
from io import FileIO

__all__: list[str] = []


def nameless_file(directory: str) -> FileIO:
    """
    Raises:
        ValueError: `directory` is none, or no file can be made there.
    """
    try:
        if not os.path.isdir(directory):
            raise NotADirectoryError("it is no directory")
        return tempfile.TemporaryFile(dir=directory, buffering=0)
    except OSError as error:
        raise ValueError(f"{directory!r} can't hold what is offloaded: {error}. Name a directory, on a local disk") from error


def room_on_disk(directory: str, nbytes: int) -> FileIO:
    """A file of that many bytes, which it has on the disk: a write to a mapped file on a full disk would end the process.

    Raises:
        OSError: The disk is full.
        ValueError: As for `nameless_file`.
    """
    file = nameless_file(directory)
    try:
        if nbytes:
            os.posix_fallocate(file.fileno(), 0, nbytes)
    except OSError as error:
        file.close()
        raise OSError(error.errno, f"{directory!r} has no room for {nbytes} more bytes of what is offloaded: {error.strerror}") from error
    return file
