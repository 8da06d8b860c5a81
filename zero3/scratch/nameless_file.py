"""A file without a name. It vanishes with the process, however that ends."""

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
