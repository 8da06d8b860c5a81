"""A progress bar, if tqdm is installed and stderr is a terminal."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__: list[str] = []


@contextmanager
def progress(total: int, doing: str, *, shown: bool = True) -> Iterator[Callable[[int], object]]:
    """Context that yields a function, which is called with the number of bytes that are done since
    its last call.
    """
    try:
        tqdm = importlib.import_module("tqdm").tqdm if shown and sys.stderr.isatty() else None
    except ImportError:
        tqdm = None
    if tqdm is None:
        yield lambda nbytes: None
        return
    with tqdm(total=total, desc=doing, unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update
