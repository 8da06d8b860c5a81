"""The disk as saving sees it: tests record its operations, or let one of them fail."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from zero3.checkpoint import file_operations

OPERATIONS = {
    name: value
    for name, value in vars(file_operations).items()
    if callable(value) and value.__module__ == file_operations.__name__ and not name.startswith("_")
}


def replaced(name: str, by: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Within it `by` stands in the place of an operation, in all threads."""
    assert name in OPERATIONS
    return mock.patch.object(file_operations, name, by)


def full(*given: object) -> NoReturn:
    """In the place of an operation."""
    raise OSError(errno.ENOSPC, "No space left on device")


def held(until: threading.Event) -> AbstractContextManager[Any]:
    """Within it a save in the background waits for the event before it makes a file."""

    def create(path: Path) -> Any:
        assert threading.current_thread().name != "zero3.save_checkpoint" or until.wait(100)
        return OPERATIONS["create"](path)

    return replaced("create", create)
