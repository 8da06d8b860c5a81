"""Several checkpoints in one directory: finds the newest, and deletes old ones."""

from __future__ import annotations

import os
from pathlib import Path

from . import file_operations, manifest

__all__: list[str] = []


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """Returns the checkpoint in a directory that was saved last, to resume from it.

    Incomplete checkpoints are passed over. Each checkpoint holds a number that grows from save to save, and the highest number
    decides. Clocks and names do not matter.

    Args:
        directory: The directory that holds the checkpoints, each under its own name: `save_checkpoint(directory / name, ...)`.

    Returns:
        The checkpoint's path, or None if there is none.

    Raises:
        ValueError: A checkpoint's manifest was changed after the save.

    Example::

        latest = zero3.latest_checkpoint(directory)
    """
    numbered = _numbered(Path(directory))
    return max(numbered)[1] if numbered else None


def next_number(path: Path) -> int:
    """The number of a new checkpoint at `path`: one more than any in the same directory. Damaged checkpoints do not count."""
    return max((number for number, _ in _numbered(path.parent, strict=False)), default=0) + 1


def prune(directory: Path, keep: int) -> None:
    """Deletes all but the `keep` newest checkpoints, and what interrupted saves and deletions have left. Links are passed over."""
    numbered = sorted((number, path) for number, path in _numbered(directory, strict=False) if not path.is_symlink())
    for _, path in numbered[:-keep]:
        manifest.delete(path)
    for name in file_operations.names_in(directory):
        path = directory / name
        if path.is_dir() and not path.is_symlink() and manifest.is_remains(path):
            manifest.delete(path)


def _numbered(directory: Path, strict: bool = True) -> list[tuple[int, Path]]:
    found = []
    for name in file_operations.names_in(directory):
        if (directory / name / manifest.NAME).is_file():
            try:
                found.append((int(manifest.parse(directory / name / manifest.NAME)["number"]), directory / name))
            except (ValueError, KeyError):
                if strict:
                    raise
    return found
