"""Tensors without values that record where their elements come from, through the operations with
which transformers converts files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType, MappingProxyType
from typing import Any

import torch
from torch import Tensor

from .index_maps import IndexMap, Joined, View, stacked

__all__: list[str] = []


_SAME = ("contiguous", "clone", "detach")
_JOINS = MappingProxyType(
    {"cat": Joined, "concat": Joined, "concatenate": Joined, "stack": stacked}
)
# of a contiguous tensor they make views, which show the same elements in another order
_VIEWS = (
    *("reshape", "view", "flatten", "squeeze", "unsqueeze", "transpose", "swapaxes", "swapdims"),
    *("t", "permute", "narrow", "select", "unbind", "split", "split_with_sizes", "chunk"),
)


class Untraceable(Exception):
    """The operation does more than move elements, or has no rule here."""


class TracedTensor(Tensor):
    """On the meta device. `index_map` tells which element of which source each element is."""

    index_map: IndexMap[Any]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name, options = func.__name__, kwargs or {}
        if name in _SAME:
            return args[0]
        if name in _JOINS:
            return _joined(_JOINS[name], *args, **options)
        if name in _VIEWS or (name == "__getitem__" and isinstance(args[1], int | EllipsisType)):
            return _viewed(func, *args, **options)
        found = super().__torch_function__(func, types, args, options)  # type: ignore[no-untyped-call]
        if isinstance(found, Tensor) or (
            isinstance(found, list | tuple) and any(isinstance(item, Tensor) for item in found)
        ):
            raise Untraceable(f"{name} is not known here")
        return found  # a shape or a dtype


def traced(index_map: IndexMap[Any], dtype: torch.dtype) -> TracedTensor:
    tensor = index_map.blank().to(dtype).as_subclass(TracedTensor)
    tensor.index_map = index_map
    return tensor


def _joined(
    join: Callable[..., Any], tensors: Sequence[TracedTensor], dim: int = 0
) -> TracedTensor:
    return traced(join([each.index_map for each in tensors], dim), tensors[0].dtype)


def _viewed(func: Callable[..., Any], x: TracedTensor, /, *args: Any, **kwargs: Any) -> Any:
    """torch makes its views of a tensor without values."""
    blank = x.index_map.blank().to(x.dtype)
    found = func(blank, *args, **kwargs)
    views = (found,) if isinstance(found, Tensor) else tuple(found)
    if any(view.dtype != blank.dtype for view in views):
        raise Untraceable(f"{func.__name__} as another dtype is not known here")
    made = tuple(traced(View(x.index_map, view), x.dtype) for view in views)
    return made[0] if isinstance(found, Tensor) else made
