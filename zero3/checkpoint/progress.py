"""A progress bar, if tqdm or rich is installed and stderr is a terminal."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__: list[str] = []


@contextmanager
def progress(total: int, doing: str, *, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Context that yields a function, which is called with the number of bytes that are done since
    its last call.
    """
    seen = shown and sys.stderr.isatty()
    if seen and (tqdm := _installed("tqdm")) is not None:
        with tqdm.tqdm(total=total, desc=doing, unit="B", unit_scale=True, leave=False) as bar:
            yield bar.update
    elif seen and (rich := _installed("rich.progress")) is not None:
        console = importlib.import_module("rich.console").Console(stderr=True)
        with rich.Progress(console=console, transient=True) as bar:
            task = bar.add_task(doing, total=total)
            yield lambda nbytes: bar.advance(task, nbytes)
    else:
        yield lambda nbytes: None


def _installed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
