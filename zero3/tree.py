"""Finds the tensors in whatever a module takes or returns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn

__all__: list[str] = []

_MAX_DEPTH = 8  # deeper than any output in use
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, nn.Module)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a nest of lists, tuples, dicts, dataclasses and plain objects (caches, model outputs).

    Level by level, and each object once, so that a web of objects that know each other costs no more than its size.
    """
    level, seen = [value], set[int]()
    for _ in range(_MAX_DEPTH + 1):
        following: list[Any] = []
        for item in level:
            if isinstance(item, _LEAVES) or id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, Tensor):
                yield item
            else:
                following.extend(_held_by(item))
        level = following


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    slots = (kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__)
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
