"""Values from files: numbers, text, lists, tuples and dicts, and tensors in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..checkpoint.lazy import Lazy
from .pickled import Made

__all__: list[str] = []


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists, tuples and dicts, with `change(leaf)` for each leaf."""
    if type(value) in (list, tuple):
        return type(value)(mapped(item, change) for item in value)
    if type(value) is dict:
        return {key: mapped(item, change) for key, item in value.items()}
    return change(value)


def same(one: Any, other: Any) -> bool:
    """Whether two values from files say the same, tensors bit by bit."""
    if isinstance(one, Lazy):
        alike = isinstance(other, Lazy) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return alike and all(
            mine == theirs for mine, theirs in zip(one.pieces(), other.pieces(), strict=True)
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(same(held, other[key]) for key, held in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Made):
        return same(
            [one.name, one.arguments, one.state], [other.name, other.arguments, other.state]
        )
    return bool(one == other or one != one)


def small(value: Any) -> Any:
    """Numbers are read at once."""
    return value.tensor() if isinstance(value, Lazy) and not value.shape else value
