"""Checkpoints side by side in one directory: which is the newest, and which are to go."""

from __future__ import annotations

import os
from pathlib import Path

from . import file_operations, manifest

__all__: list[str] = []


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in `directory` that was saved last, or None: what to resume from.

    It is found by looking at what is complete, so there is no file that could point to something that is not. Saves are
    numbered, so that neither clocks nor names decide.

    Args:
        directory: that in which `save_checkpoint(directory / name, ...)` made them.

    Raises:
        ValueError: a manifest that was changed.
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
