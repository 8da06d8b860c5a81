"""Everything that saving does to a file system, one function an operation: a test can record them, and fail each in turn."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

__all__: list[str] = []

_AT_ONCE = 512  # buffers a call: below the limit of any system (IOV_MAX)


def make_directory(path: Path) -> None:
    """With its parents. A directory that is there already is as good."""
    path.mkdir(parents=True, exist_ok=True)


def names_in(path: Path) -> list[str]:
    """Sorted; none if there is no such directory."""
    return sorted(os.listdir(path)) if path.is_dir() else []


def create(path: Path) -> FileIO:
    """A new file. One that is there already belongs to somebody else."""
    return FileIO(os.fspath(path), "x")


def reopen(path: Path) -> FileIO:
    """A file that another rank has created, to write a range of it."""
    return FileIO(os.fspath(path), "r+")


def write(file: FileIO, views: list[memoryview]) -> None:
    """The buffers one after another, at the file's position."""
    for first in range(0, len(views), _AT_ONCE):
        rest = views[first : first + _AT_ONCE]
        while rest := list(_without(rest, os.writev(file.fileno(), rest))):
            pass


def write_at(file: FileIO, offset: int, view: memoryview) -> None:
    while view:
        count = os.pwrite(file.fileno(), view, offset)
        view, offset = view[count:], offset + count


def resize(file: FileIO, nbytes: int) -> None:
    """To its final size, before ranks write their ranges of it."""
    os.ftruncate(file.fileno(), nbytes)


def copy(old: Path, new: Path) -> None:
    shutil.copyfile(old, new)


def sync(file: FileIO) -> None:
    """Returns when the file's bytes are on the disk."""
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Returns when the names in it are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(old: Path, new: Path) -> None:
    """One atomic rename: whoever looks finds what was under `new` before, or what is now."""
    os.replace(old, new)


def remove(path: Path) -> None:
    """A file, or a directory with all that is in it. Gone already is as good."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _without(views: list[memoryview], count: int) -> Iterator[memoryview]:
    for view in views:
        if count < len(view):
            yield view[count:]
        count = max(0, count - len(view))
