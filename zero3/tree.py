"""Finds the tensors in whatever a module takes or returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

__all__: list[str] = []

_MAX_DEPTH = 8  # deeper than any output in use; ends the walk through self-referring objects
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, nn.Module)


def tensors_in(value: Any, depth: int = _MAX_DEPTH) -> Iterator[Tensor]:
    """Every tensor in a nest of lists, tuples, dicts, dataclasses and plain objects (caches, model outputs)."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, _LEAVES) or depth == 0:
        return
    if isinstance(value, Mapping):
        inner: Any = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = value
    else:
        slots = (getattr(value, name, None) for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
        inner = [*getattr(value, "__dict__", {}).values(), *slots]
    for item in inner:
        yield from tensors_in(item, depth - 1)
