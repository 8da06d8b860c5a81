"""Checkpoints side by side in one directory: which is the newest, and which are to go."""

from __future__ import annotations

import os
from pathlib import Path

from . import file_operations, manifest

__all__: list[str] = []


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in a directory that was saved last: the one to resume from.

    Only complete checkpoints are looked at. Saves are numbered, so neither clocks nor names decide.

    Args:
        directory: The directory that holds them, each under a name of its own: `save_checkpoint(directory / name, ...)`.

    Returns:
        The checkpoint's path, or None if there is none.

    Raises:
        ValueError: A manifest was changed.

    Example::

        latest = zero3.latest_checkpoint(directory)
    """
    numbered = _numbered(Path(directory))
    return max(numbered)[1] if numbered else None


def next_number(path: Path) -> int:
    """For a new checkpoint at `path`: one more than any beside it, or than what it replaces. Damaged ones do not count."""
    return max((number for number, _ in _numbered(path.parent, strict=False)), default=0) + 1


def prune(directory: Path, keep: int) -> None:
    """Deletes all but the newest, and what deletions and saves that were cut off have left. A link is neither followed nor counted."""
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
