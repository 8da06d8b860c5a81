"""Tensors without values that record where their elements come from, through the operations with
which transformers converts files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .index_maps import IndexMap, joined, stacked

__all__: list[str] = []


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
        rule = getattr(_Rules, func.__name__, None)
        if rule is not None:
            return rule(*args, **(kwargs or {}))
        found = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(found, Tensor) or (
            isinstance(found, list | tuple) and any(isinstance(item, Tensor) for item in found)
        ):
            raise Untraceable(f"{func.__name__} is not known here")
        return found  # a shape or a dtype


def traced(index_map: IndexMap[Any], dtype: torch.dtype) -> TracedTensor:
    tensor = torch.empty(index_map.shape, dtype=dtype, device="meta").as_subclass(TracedTensor)
    tensor.index_map = index_map
    return tensor


def _sizes(given: Sequence[Any]) -> list[int]:
    """The sizes in `view(2, 3)` and in `view((2, 3))`."""
    return (
        list(given[0])
        if len(given) == 1 and isinstance(given[0], list | tuple | torch.Size)
        else list(given)
    )


class _Rules:
    """A rule for each function of torch, under its name and with its signature."""

    @staticmethod
    def contiguous(x: TracedTensor, *_: Any, **__: Any) -> TracedTensor:
        return x

    clone = detach = contiguous

    @staticmethod
    def reshape(x: TracedTensor, *shape: Any) -> TracedTensor:
        return traced(x.index_map.reshaped(*_sizes(shape)), x.dtype)

    view = reshape

    @staticmethod
    def flatten(x: TracedTensor, start_dim: int = 0, end_dim: int = -1) -> TracedTensor:
        end = end_dim % x.dim()
        return _Rules.reshape(x, *x.shape[:start_dim], -1, *x.shape[end + 1 :])

    @staticmethod
    def squeeze(x: TracedTensor, dim: int | None = None) -> TracedTensor:
        dropped = [
            d for d in range(x.dim()) if x.shape[d] == 1 and (dim is None or d == dim % x.dim())
        ]
        return _Rules.reshape(x, [size for d, size in enumerate(x.shape) if d not in dropped])

    @staticmethod
    def unsqueeze(x: TracedTensor, dim: int) -> TracedTensor:
        dim = dim % (x.dim() + 1)
        return _Rules.reshape(x, [*x.shape[:dim], 1, *x.shape[dim:]])

    @staticmethod
    def transpose(x: TracedTensor, dim0: int, dim1: int) -> TracedTensor:
        return traced(x.index_map.transposed(dim0, dim1), x.dtype)

    swapaxes = swapdims = transpose

    @staticmethod
    def t(x: TracedTensor) -> TracedTensor:
        return _Rules.transpose(x, 0, 1) if x.dim() > 1 else x

    @staticmethod
    def permute(x: TracedTensor, *dims: Any) -> TracedTensor:
        return traced(x.index_map.permuted(_sizes(dims)), x.dtype)

    @staticmethod
    def narrow(x: TracedTensor, dim: int, start: int, length: int) -> TracedTensor:
        return traced(x.index_map.narrowed(dim, start, length), x.dtype)

    @staticmethod
    def select(x: TracedTensor, dim: int, index: int) -> TracedTensor:
        dim, index = dim % x.dim(), index % x.shape[dim]
        return _Rules.reshape(
            _Rules.narrow(x, dim, index, 1), [*x.shape[:dim], *x.shape[dim + 1 :]]
        )

    @staticmethod
    def unbind(x: TracedTensor, dim: int = 0) -> tuple[TracedTensor, ...]:
        return tuple(_Rules.select(x, dim, index) for index in range(x.shape[dim]))

    @staticmethod
    def split(
        x: TracedTensor, split_size: int | Sequence[int], dim: int = 0
    ) -> tuple[TracedTensor, ...]:
        size = x.shape[dim]
        sizes = (
            [min(split_size, size - start) for start in range(0, size, split_size)]
            if isinstance(split_size, int)
            else list(split_size)
        )
        if sum(sizes) != size:
            raise ValueError(f"{tuple(x.shape)} can't be split into {sizes} along dimension {dim}")
        return tuple(
            _Rules.narrow(x, dim, sum(sizes[:number]), length)
            for number, length in enumerate(sizes)
        )

    split_with_sizes = split

    @staticmethod
    def chunk(x: TracedTensor, chunks: int, dim: int = 0) -> tuple[TracedTensor, ...]:
        return _Rules.split(x, max(1, -(-x.shape[dim] // chunks)), dim)

    @staticmethod
    def cat(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
        return traced(joined([x.index_map for x in tensors], dim), tensors[0].dtype)

    concat = concatenate = cat

    @staticmethod
    def stack(tensors: Sequence[TracedTensor], dim: int = 0) -> TracedTensor:
        return traced(stacked([x.index_map for x in tensors], dim), tensors[0].dtype)

    @staticmethod
    def __getitem__(x: TracedTensor, index: Any) -> TracedTensor:
        if index is Ellipsis:
            return x
        if isinstance(index, int):
            return _Rules.select(x, 0, index)
        raise Untraceable(f"indexing by {index!r:.40} is not known here")
