"""What lives as long as a process group. Torch's groups take no attributes, so it is an argument of
the group's finalizer, and found there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__: list[str] = []

T = TypeVar("T")


def keep_with(group: Any, value: T, end: Callable[[T], None] = lambda value: None) -> T:
    """`end`: is called with `value` when the group is destroyed, or the process ends."""
    weakref.finalize(group, end, value)
    return value


def kept_with(group: Any, kind: type[T]) -> T | None:
    """What of this kind was kept with `group` first."""
    found = list[T]()
    for reference in weakref.getweakrefs(group):
        ending = reference.__callback__
        known = ending.peek() if isinstance(ending, weakref.finalize) else None
        if known is not None:
            found += (each for each in known[2] if isinstance(each, kind))
    return found[-1] if found else None  # the newest reference comes first
