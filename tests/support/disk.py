"""The disk as saving sees it: tests record its operations, or let one of them fail."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import AbstractContextManager
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
