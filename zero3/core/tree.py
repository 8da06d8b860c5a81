"""Finds the tensors in whatever a module takes or returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

__all__: list[str] = []

_MAX_DEPTH = 8  # deeper than any output in use
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, nn.Module)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a nest of lists, tuples, dicts, dataclasses and plain objects (caches, model outputs).

    Level by level, and each object once, so that a web of objects that know each other costs no more than its size.
    """
    found: list[Tensor] = []
    level, seen = [value], set[int]()
    for _ in range(_MAX_DEPTH + 1):
        following: list[Any] = []
        for item in level:
            if item is None or id(item) in seen:
                continue
            if isinstance(item, Tensor):
                seen.add(id(item))
                found.append(item)
            elif not isinstance(item, _LEAVES):
                seen.add(id(item))
                following.extend(_held_by(item))
        if not following:
            break
        level = following
    return found


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nest of lists, tuples, dicts and dataclasses with `function` of every tensor; what has none stays the same object.

    Other objects (caches, configurations) are left as they are, with what they hold: they are not ours to copy.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return _rebuilt(
            value,
            {key: (item, map_tensors(function, item)) for key, item in value.items()},
            lambda new, key, item: new.__setitem__(key, item),
        )
    if isinstance(value, (list, tuple)):
        mapped = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(mapped, value, strict=True)):
            return value
        return type(value)(*mapped) if hasattr(value, "_fields") else type(value)(mapped)
    if is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name, None) for field in fields(value)}
        return _rebuilt(value, {name: (item, map_tensors(function, item)) for name, item in items.items()}, object.__setattr__)
    return value


def _rebuilt(value: Any, items: dict[Any, tuple[Any, Any]], put: Callable[[Any, Any, Any], object]) -> Any:
    changed = {key: new for key, (old, new) in items.items() if new is not old}
    if not changed:
        return value
    rebuilt = copy(value)
    for key, item in changed.items():
        put(rebuilt, key, item)
    return rebuilt


def _held_by(value: Any) -> Iterable[Any]:
    if isinstance(value, (list, tuple, set, frozenset)):
        return value
    if isinstance(value, (dict, Mapping)):  # the first is quick to tell
        return value.values()
    slots = (kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__)
    names = [name for slot in slots for name in ((slot,) if isinstance(slot, str) else slot)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
