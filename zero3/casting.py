"""Casts the inputs and outputs of a layer."""

from __future__ import annotations

import operator
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

__all__: list[str] = []


def caller_for(inputs: torch.dtype | None, output: torch.dtype | None) -> Callable[..., Any]:
    """Returns a function `(module, *args, **kwargs)` that calls the module, and casts its floating
    inputs and outputs to these dtypes. None: no cast.

    Autograd records the casts, so gradients have the dtypes of the original tensors.
    """
    return operator.call if inputs is None and output is None else partial(_call, inputs, output)


def _call(
    inputs: torch.dtype | None,
    output: torch.dtype | None,
    module: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return cast(module(*cast(args, inputs), **cast(kwargs, inputs)), output)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    def cast_one(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return value if dtype is None else map_tensors(cast_one, value)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies `function` to every tensor in nested lists, tuples, dicts and dataclasses.

    A container without a changed tensor stays the same object. Other objects (caches,
    configurations) are not copied or changed.
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
        return _rebuilt(
            value,
            {name: (item, map_tensors(function, item)) for name, item in items.items()},
            object.__setattr__,
        )
    return value


def _rebuilt(
    value: Any, items: dict[Any, tuple[Any, Any]], put: Callable[[Any, Any, Any], object]
) -> Any:
    changed = {key: new for key, (old, new) in items.items() if new is not old}
    if not changed:
        return value
    rebuilt = copy(value)
    for key, item in changed.items():
        put(rebuilt, key, item)
    return rebuilt
