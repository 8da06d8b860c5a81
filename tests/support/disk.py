"""The disk as saving and loading see it: tests record its operations, or let one of them fail."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from zero3.checkpoint import file_operations, safetensors_files

OPERATIONS = {
    name: value
    for name, value in vars(file_operations).items()
    if callable(value) and value.__module__ == file_operations.__name__ and not name.startswith("_")
}


read = safetensors_files.read_bytes  # into memory from an offset on; it gives the number of bytes


def replaced(name: str, by: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Within it `by` stands in the place of an operation, in all threads."""
    assert name in OPERATIONS
    return mock.patch.object(file_operations, name, by)


def reading(by: Callable[[FileIO, int, memoryview], int], at_once: int = safetensors_files.STAGE_BYTES) -> AbstractContextManager[Any]:
    """Within it `by` stands in the place of `read`, for the bytes of tensors; it is asked for at most so many of them at once."""
    return mock.patch.multiple(safetensors_files, read_bytes=by, STAGE_BYTES=at_once)


def full(*given: object) -> NoReturn:
    """In the place of an operation."""
    raise OSError(errno.ENOSPC, "No space left on device")


def held(until: threading.Event) -> AbstractContextManager[Any]:
    """Within it a save in the background waits for the event before it makes a file."""

    def create(path: Path) -> Any:
        assert threading.current_thread().name != "zero3.save_checkpoint" or until.wait(100)
        return OPERATIONS["create"](path)

    return replaced("create", create)
