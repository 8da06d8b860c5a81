"""The operations of saving on a file system. Each is a function of its own, so that a test can
record it and make it fail.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

__all__: list[str] = []

_MARK = ".zero3"  # in a directory of what is not finished
_AT_ONCE = 512  # buffers a call: below the limit of any system (IOV_MAX)


def directory_of(path: str | os.PathLike[str]) -> Path:
    """The directory that a caller has named. Raises TypeError if it is no path, and ValueError if
    it is an empty text.
    """
    if not os.fspath(path):
        raise ValueError('the path is an empty text: "." is the working directory')
    return Path(path)


def make_directory(path: Path) -> None:
    """Creates the directory with its parents, unless it exists."""
    path.mkdir(parents=True, exist_ok=True)


def names_in(path: Path) -> list[str]:
    """Returns the names in a directory, sorted. There are none if the directory does not exist."""
    return sorted(os.listdir(path)) if path.is_dir() else []


def create(path: Path) -> FileIO:
    """Creates a file. It is an error if the file exists: it belongs to another save."""
    return FileIO(os.fspath(path), "x")


@contextmanager
def writing(path: Path) -> Iterator[FileIO]:
    """Creates a file, to be written inside. At the end its bytes are on the disk."""
    with create(path) as file:
        yield file
        sync(file)


def reopen(path: Path) -> FileIO:
    """Opens a file that another rank has created, to write a range of it."""
    return FileIO(os.fspath(path), "r+")


def write(file: FileIO, views: list[memoryview]) -> None:
    """Writes the buffers one after another, from the file's position on."""
    for first in range(0, len(views), _AT_ONCE):
        rest = views[first : first + _AT_ONCE]
        while rest := list(_without(rest, os.writev(file.fileno(), rest))):
            pass


def write_at(file: FileIO, offset: int, view: memoryview) -> None:
    while view:
        count = os.pwrite(file.fileno(), view, offset)
        view, offset = view[count:], offset + count


def resize(file: FileIO, nbytes: int) -> None:
    """Gives the file its final size, before ranks write their ranges of it."""
    os.ftruncate(file.fileno(), nbytes)


def copy(old: Path, new: Path) -> None:
    shutil.copyfile(old, new)


def sync(file: FileIO) -> None:
    """Returns when the file's bytes are on the disk."""
    os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Returns when the names in the directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(old: Path, new: Path) -> None:
    """Renames atomically: at every moment `new` is either the earlier file or the new one."""
    os.replace(old, new)


def remove(path: Path) -> None:
    """Removes a file, or a directory with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def becoming(path: Path) -> Iterator[Path]:
    """Yields a place to write a file or a directory to, which becomes `path` at the end; nothing,
    or an empty directory, is there. What raises inside leaves nothing. What a killed process has
    left is taken away. Raises ValueError if another process writes it at this moment, or has
    written it; `path` is a symbolic link; or where it would be written lies something else.
    """
    path = Path(os.path.abspath(path))
    if path.is_symlink():
        raise ValueError(f"{path} is a symbolic link: name the place that it leads to")
    make_directory(path.parent)
    around = path.with_name(f"{path.name}.unfinished")
    try:
        with _held(around, path):
            yield around / path.name
            if path.is_dir():
                path.rmdir()
            elif os.path.lexists(path):
                raise ValueError(f"{path} is there already: another process has written it")
            replace(around / path.name, path)
            sync_directory(path.parent)
    finally:
        with suppress(OSError):  # it is not empty: another process has it
            around.rmdir()


@contextmanager
def _held(around: Path, path: Path) -> Iterator[None]:
    """Inside, `around` is a directory of this process alone, empty but for a mark at the beginning,
    and empty at the end.
    """
    try:
        around.mkdir()
        is_new = True
    except FileExistsError:
        is_new = False
        if (
            not around.is_dir()
            or not set(names_in(around)) <= {_MARK, path.name}
            or (names_in(around) and not (around / _MARK).is_file())
        ):
            raise ValueError(
                f"{around} is there already, where {path} is written first: move it away"
            ) from None
    try:
        mark = (around / _MARK).open("a")
    except FileNotFoundError:  # the other process has ended, and taken it away
        raise ValueError(f"another process writes {path}") from None
    with mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_mine = os.path.samestat(os.fstat(mark.fileno()), (around / _MARK).stat())
        except (BlockingIOError, FileNotFoundError):
            is_mine = False
        except OSError:  # a file system without locks: who has made the directory has it
            is_mine = is_new
        if not is_mine:
            raise ValueError(f"another process writes {path}; if none does, remove {around}")
        try:
            remove(around / path.name)
            yield
        finally:
            remove(around / path.name)
            (around / _MARK).unlink(missing_ok=True)


def _without(views: list[memoryview], count: int) -> Iterator[memoryview]:
    """The buffers without their first `count` bytes."""
    for view in views:
        if count < len(view):
            yield view[count:]
        count = max(0, count - len(view))
