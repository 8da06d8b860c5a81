"""Several checkpoints in one directory: finds the newest, and deletes old ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from ..access import used
from ..comm.agreement import agreeing, exchange_texts
from ..core.layer_state import LayerState
from . import file_operations, manifest
from .hosts import files_here

__all__: list[str] = []


def latest_checkpoint(
    directory: str | os.PathLike[str],
    *others: str | os.PathLike[str],
    model: nn.Module | None = None,
    run: str | None = None,
) -> Path | None:
    """Returns the checkpoint in a directory, or in several, that was saved last, to resume from it.

    Incomplete checkpoints are passed over. Each checkpoint holds a number that grows from save to
    save, over all directories, and the highest number decides. Clocks and names do not matter.

    With more than `directory`, a checkpoint counts only if all its files are there in their sizes.

    Args:
        directory: The directory that holds the checkpoints, each under its own name:
            `save_checkpoint(directory / name, ...)`.
        others: Further ones, such as a slower file system to which fewer checkpoints go. If two
            hold the same checkpoint, the path in the first one is returned.
        model: A sharded model whose ranks, all of them, call this: they take the newest checkpoint
            that all of them together have, as is needed for those saved with `local=True`. A rank
            may have other directories than the others, but as many.
        run: Only checkpoints of the run with this name count. None: of any run.

    Returns:
        The checkpoint's path, on each rank its own; or None, on all, if there is none.

    Raises:
        ValueError: A checkpoint's manifest was changed after the save (with `directory` alone); or
            `run` is empty; or checkpoints are of different runs, and there are several directories
            or `model`; or ranks differ in `run` or in the number of directories.
        TypeError: `run` is no text, or a directory is no path. With `model`, all ranks raise it.
        OSError: A directory can't be read. With `model`, all ranks raise it.

    Example::

        latest = zero3.latest_checkpoint("/local/run", "/shared/run", model=model)
    """
    if model is None:
        roots = [file_operations.directory_of(path) for path in (directory, *others)]
        check_run(run)
        if not others and run is None:
            numbered = [(number, path) for number, path, _ in _numbered(roots[0])]
            return max(numbered)[1] if numbered else None
        return _newest(roots, [_views(roots, run)], alone=not others)
    first = used(model, "latest_checkpoint")[0]
    with agreeing(first, "latest_checkpoint") as lines:
        check_run(run)
        # here: one rank's may be no path
        roots = [file_operations.directory_of(path) for path in (directory, *others)]
        lines += [f"run: {run}", f"directories: {len(roots)}"]
        text = json.dumps(_views(roots, run))  # here: a disk may fail on one rank alone
    texts = exchange_texts(first, text)
    return _newest(roots, [json.loads(text) for text in texts], alone=False)


_View = dict[str, Any]


def _views(roots: Sequence[Path], run: str | None) -> list[_View]:
    """What this rank sees of each checkpoint."""
    found = []
    for index, root in enumerate(roots):
        for number, path, of in _numbered(root, strict=False):
            if run is None or of == run:
                with suppress(ValueError, OSError):
                    content = manifest.parse(path / manifest.NAME)
                    if not content.get("local"):  # a part of such a one counts
                        manifest.read(path)
                    here = files_here(path, content)
                    found.append({
                        "number": number, "root": index, "name": path.name, "run": of,
                        "data": content["data"], "all": sorted(content["files"]), "files": here,
                    })  # fmt: skip
    return found


def _newest(roots: Sequence[Path], views: Sequence[list[_View]], *, alone: bool) -> Path | None:
    together: dict[tuple[int, str, str], tuple[_View, set[str]]] = {}
    for view in views:
        for each in view:
            key = (each["root"], each["name"], each["data"])
            together.setdefault(key, (each, set()))[1].update(each["files"])
    whole = [each for each, files in together.values() if files == set(each["all"])]
    runs = {str(each["run"]) for each in whole}
    if len(runs) > 1 and not alone:
        raise ValueError(
            f"{', '.join(map(str, roots))}: there are checkpoints of the runs "
            f"{', '.join(sorted(runs))}. Say by run= which one is to go on"
        )
    if not whole:
        return None
    newest = max(whole, key=lambda each: (each["number"], -each["root"]))
    return roots[newest["root"]] / str(newest["name"])


def check_run(run: Any) -> None:
    if run is not None and not isinstance(run, str):
        raise TypeError(f"run must be the name of a run, a text, or None, found {run!r}")
    if run == "":
        raise ValueError("run must be the name of a run, or None, found an empty text")


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
    own = ((n, path) for n, path, of in _numbered(directory, strict=False) if of == run)
    for _, path in sorted((n, path) for n, path in own if not path.is_symlink())[:-keep]:
        manifest.delete(path)
    for path in filter(manifest.is_remains, _paths_in(directory)):
        if not path.is_symlink() and not manifest.names_another_run(path, run):
            manifest.delete(path)


def _numbered(directory: Path, strict: bool = True) -> list[tuple[int, Path, str | None]]:
    """The number, the path and the run of each checkpoint."""
    found = []
    for path in _paths_in(directory):
        if (path / manifest.NAME).is_file():
            try:
                content = manifest.parse(path / manifest.NAME)
                found.append((int(content["number"]), path, content.get("run")))
            except (ValueError, KeyError):
                if strict:
                    raise
    return found


def _paths_in(directory: Path) -> list[Path]:
    """What is there, without directories that may not be searched, as a disk's `lost+found`: they
    hold no checkpoint of ours.
    """
    paths = [directory / name for name in file_operations.names_in(directory)]
    return [path for path in paths if not path.is_dir() or os.access(path, os.R_OK | os.X_OK)]


class Saves:
    """The run to which a model's checkpoints belong, and the one that is still being written. Each
    layer has one.
    """

    def __init__(self) -> None:
        self.run: str | None = None  # of the checkpoint that was loaded or saved last
        self.number = 0  # its own; later ones have higher numbers, wherever they lie
        self._wait: Callable[[], None] | None = None

    def belong_to(self, run: str | None, number: int) -> None:
        self.run, self.number = run, max(self.number, number)

    def begin(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def finish(self) -> None:
        """Waits for what has begun, if anything has. That calls `end`."""
        if self._wait is not None:
            self._wait()

    def end(self) -> None:
        self._wait = None


def saves_of(state: LayerState) -> Saves:
    found: Saves = state.kept.setdefault(Saves, Saves())
    return found
