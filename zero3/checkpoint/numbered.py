"""Several checkpoints in one directory: finds the newest, and deletes old ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import file_operations, manifest

__all__: list[str] = []


def latest_checkpoint(directory: str | os.PathLike[str], *, run: str | None = None) -> Path | None:
    """Returns the checkpoint in a directory that was saved last, to resume from it.

    Incomplete checkpoints are passed over. Each checkpoint holds a number that grows from save to
    save, and the highest number decides. Clocks and names do not matter.

    Args:
        directory: The directory that holds the checkpoints, each under its own name:
            `save_checkpoint(directory / name, ...)`.
        run: Only checkpoints of the run with this name count, and only if all their files are there
            in their sizes. None: of any run.

    Returns:
        The checkpoint's path, or None if there is none.

    Raises:
        ValueError: A checkpoint's manifest was changed after the save (without `run`), or `run` is
            empty.
        TypeError: `run` is no text.

    Example::

        latest = zero3.latest_checkpoint(directory)
    """
    check_run(run)
    numbered = [
        (number, path)
        for number, path, of in _numbered(Path(directory), strict=run is None)
        if run is None or of == run
    ]
    return next(
        (path for _, path in sorted(numbered, reverse=True) if run is None or _is_whole(path)), None
    )


def check_run(run: Any) -> None:
    if run is not None and not isinstance(run, str):
        raise TypeError(f"run must be the name of a run, a text, or None, found {run!r}")
    if run == "":
        raise ValueError("run must be the name of a run, or None, found an empty text")


def _is_whole(path: Path) -> bool:
    try:
        manifest.read(path)
    except (ValueError, OSError):
        return False
    return True


def next_number(path: Path) -> int:
    """The number of a new checkpoint at `path`: one more than any in the same directory. Damaged
    checkpoints do not count.
    """
    return max((number for number, _, _ in _numbered(path.parent, strict=False)), default=0) + 1


def prune(directory: Path, keep: int, run: str) -> None:
    """Deletes all but the `keep` newest checkpoints of a run, and what interrupted saves and
    deletions have left.

    Checkpoints of other runs, and of none, stay, and so does what names another run. Links are
    passed over.
    """
    numbered = sorted(
        (number, path)
        for number, path, of in _numbered(directory, strict=False)
        if of == run and not path.is_symlink()
    )
    for _, path in numbered[:-keep]:
        manifest.delete(path)
    for name in file_operations.names_in(directory):
        path = directory / name
        if (
            path.is_dir()
            and not path.is_symlink()
            and manifest.is_remains(path)
            and not manifest.names_another_run(path, run)
        ):
            manifest.delete(path)


def _numbered(directory: Path, strict: bool = True) -> list[tuple[int, Path, str | None]]:
    """The number, the path and the run of each checkpoint."""
    found = []
    for name in file_operations.names_in(directory):
        if (directory / name / manifest.NAME).is_file():
            try:
                content = manifest.parse(directory / name / manifest.NAME)
                found.append((int(content["number"]), directory / name, content.get("run")))
            except (ValueError, KeyError):
                if strict:
                    raise
    return found
