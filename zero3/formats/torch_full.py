"""One file of torch's: `{"model": state dict, "optimizer": {"state": by name, "param_groups":
[...]}}`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

from ..checkpoint import file_operations
from . import torch_files
from .run import Holds, Run
from .trees import run_of, tree_of

__all__: list[str] = []

HOLDS = Holds()


def is_one(path: Path) -> bool:
    return path.is_file()


def read(path: Path, files: ExitStack, _: Callable[[int], object]) -> Run:
    file = files.enter_context(FileIO(os.fspath(path)))
    return run_of(torch_files.TorchFile(file, str(path)).value, "torch", str(path))


def write(run: Run, path: Path, advance: Callable[[int], object]) -> None:
    with file_operations.writing(path) as file:
        torch_files.write(file, 0, tree_of(run), advance)
