"""Index maps tell which element of which source each element of a tensor is, after cuts, joins,
reshapes and transpositions.

They hold integers and no values. With a map a rank finds the elements that its slice needs,
although a checkpoint's tensors are rearranged in the model, and no tensor has to be whole for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

__all__: list[str] = []

Key = TypeVar("Key")
_AT_ONCE = 1 << 18  # grains are looked up together, so that tables of indices stay small
# elements; if extents are shorter, looking up single elements is faster than reading ranges
LONG_EXTENT = 1 << 10


class Extent(NamedTuple, Generic[Key]):
    """Elements `[start, start + length)`, flattened, are `[at, at + length)` of `source`."""

    start: int
    source: Key
    at: int
    length: int


class IndexMap(Generic[Key]):
    """The map of a tensor of `shape`, made of `sources`.

    The elements from each multiple of `grain` to the next lie side by side in one source. `grain`
    is large if whole matrices are stacked, and 1 if a matrix is transposed.
    """

    def __init__(self, shape: Sequence[int], sources: Sequence[Key], grain: int) -> None:
        self.shape = tuple(shape)
        self.numel = math.prod(self.shape)
        self.sources = list(sources)
        self.grain = max(1, grain)

    def of(self, sources: Sequence[Key]) -> IndexMap[Key]:
        """The same map, of other sources."""
        other = copy(self)
        other.sources = list(sources)
        return other

    def locate(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Maps int64 indices `[n]` into the flattened tensor to numbers of sources `[n]` and
        indices into the flattened sources `[n]`.
        """
        raise NotImplementedError

    @property
    def is_by_ranges(self) -> bool:
        """Whether reading and writing by ranges of the sources is best."""
        return self.grain >= min(LONG_EXTENT, self.numel)

    def extents(self, start: int, stop: int) -> Iterator[Extent[Key]]:
        """Yields the extents that make up elements `[start, stop)`. Neighbours are one."""
        first, last = start // self.grain, -(-stop // self.grain)
        for low in range(first, last, _AT_ONCE):
            begins = torch.arange(low, min(low + _AT_ONCE, last), dtype=torch.int64) * self.grain
            numbers, at = self.locate(begins)
            new = torch.ones(len(begins), dtype=torch.bool)
            new[1:] = (numbers[1:] != numbers[:-1]) | (at[1:] != at[:-1] + self.grain)
            edges = [*new.nonzero().flatten().tolist(), len(begins)]
            for left, right in pairwise(edges):
                begin, end = int(begins[left]), min(int(begins[right - 1]) + self.grain, stop)
                skipped = max(0, start - begin)
                yield Extent(
                    begin + skipped,
                    self.sources[int(numbers[left])],
                    int(at[left]) + skipped,
                    end - begin - skipped,
                )

    # -- maps that are made from this one

    def reshaped(self, *shape: int) -> IndexMap[Key]:
        """One size may be -1, as in torch."""
        sizes = list(shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.numel // max(
                1, math.prod(size for size in sizes if size != -1)
            )
        if math.prod(sizes) != self.numel:
            raise ValueError(f"a tensor {self.shape} can't be reshaped to {tuple(sizes)}")
        return _Reshaped(self, sizes)

    def narrowed(self, dim: int, start: int, length: int) -> IndexMap[Key]:
        dim = self._dim(dim)
        if not 0 <= start <= start + length <= self.shape[dim]:
            raise ValueError(
                f"{start} to {start + length} are not in dimension {dim} of {self.shape}"
            )
        return _Narrowed(self, dim, start, length)

    def permuted(self, order: Sequence[int]) -> IndexMap[Key]:
        order = [self._dim(dim) for dim in order]
        if sorted(order) != list(range(len(self.shape))):
            raise ValueError(f"{tuple(order)} is no order of the dimensions of {self.shape}")
        return _Permuted(self, order)

    def transposed(self, dim0: int, dim1: int) -> IndexMap[Key]:
        order = list(range(len(self.shape)))
        order[dim0], order[dim1] = order[dim1], order[dim0]
        return self.permuted(order)

    def _dim(self, dim: int) -> int:
        if not -len(self.shape) <= dim < len(self.shape):
            raise ValueError(f"there is no dimension {dim} in {self.shape}")
        return dim % len(self.shape)


class Whole(IndexMap[Key]):
    """The map of a tensor that is a source itself."""

    def __init__(self, source: Key, shape: Sequence[int]) -> None:
        super().__init__(shape, [source], math.prod(shape))

    def locate(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(flat), flat


class Computed(IndexMap[str]):
    """No map: peft computes the tensor anew from all values of the adapter's prompt encoder."""

    def __init__(self, shape: Sequence[int], sources: Sequence[str]) -> None:
        super().__init__(shape, sources, 1)

    @property
    def is_by_ranges(self) -> bool:
        return False


class _Reshaped(IndexMap[Key]):
    def __init__(self, inner: IndexMap[Key], shape: Sequence[int]) -> None:
        super().__init__(shape, inner.sources, inner.grain)
        self._inner = inner

    def locate(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        return self._inner.locate(flat)


class _Narrowed(IndexMap[Key]):
    def __init__(self, inner: IndexMap[Key], dim: int, start: int, length: int) -> None:
        self._inner = inner
        below = math.prod(inner.shape[dim + 1 :])
        self._own = length * below
        self._all = inner.shape[dim] * below
        self._skipped = start * below
        grain = math.gcd(inner.grain, self._own, self._all, self._skipped)
        super().__init__(
            [*inner.shape[:dim], length, *inner.shape[dim + 1 :]], inner.sources, grain
        )

    def locate(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        outer = flat.div(self._own, rounding_mode="floor")
        return self._inner.locate(flat + outer * (self._all - self._own) + self._skipped)


class _Permuted(IndexMap[Key]):
    def __init__(self, inner: IndexMap[Key], order: Sequence[int]) -> None:
        self._inner = inner
        shape = [inner.shape[dim] for dim in order]
        moved = [place for place, dim in enumerate(order) if place != dim]
        kept = math.prod(shape[moved[-1] + 1 :]) if moved else inner.numel
        strides = [math.prod(inner.shape[dim + 1 :]) for dim in order]
        # for each dimension: its size, its stride in the permuted tensor, and its stride in the
        # inner one
        self._steps = [
            (shape[place], math.prod(shape[place + 1 :]), strides[place])
            for place in range(len(shape))
        ]
        super().__init__(shape, inner.sources, math.gcd(inner.grain, kept))

    def locate(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        there = torch.zeros_like(flat)
        for size, here, step in self._steps:
            there += flat.div(here, rounding_mode="floor").remainder_(size).mul_(step)
        return self._inner.locate(there)


class _Joined(IndexMap[Key]):
    def __init__(self, parts: Sequence[IndexMap[Key]], dim: int) -> None:
        self._parts = parts
        shape = parts[0].shape
        below = math.prod(shape[dim + 1 :])
        self._own = [part.shape[dim] * below for part in parts]
        self._ends = torch.tensor(self._own).cumsum(0)
        self._firsts = [
            sum(len(part.sources) for part in parts[:number]) for number in range(len(parts))
        ]
        size = sum(part.shape[dim] for part in parts)
        sources = [source for part in parts for source in part.sources]
        grain = math.gcd(*(part.grain for part in parts), *self._own)
        super().__init__([*shape[:dim], size, *shape[dim + 1 :]], sources, grain)

    def locate(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        total = int(self._ends[-1])
        outer, rest = flat.div(total, rounding_mode="floor"), flat.remainder(total)
        which = torch.bucketize(rest, self._ends, right=True)
        numbers, at = torch.empty_like(flat), torch.empty_like(flat)
        for number in range(len(self._parts)):
            if not (mine := which == number).any():
                continue
            own, end = self._own[number], int(self._ends[number])
            found, there = self._parts[number].locate(outer[mine] * own + rest[mine] - (end - own))
            numbers[mine], at[mine] = found + self._firsts[number], there
        return numbers, at


def joined(parts: Sequence[IndexMap[Key]], dim: int) -> IndexMap[Key]:
    """Joins tensors along a dimension, as `torch.cat`.

    Raises:
        ValueError: There is nothing to join, or sizes differ in another dimension.
    """
    if not parts:
        raise ValueError("there is nothing to join")
    dim = parts[0]._dim(dim)
    others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    if len(others) > 1 or len({len(part.shape) for part in parts}) > 1:
        raise ValueError(
            f"tensors {', '.join(str(part.shape) for part in parts[:4])} can't be joined along "
            f"dimension {dim}"
        )
    return _Joined(parts, dim)


def stacked(parts: Sequence[IndexMap[Key]], dim: int) -> IndexMap[Key]:
    """Joins tensors along a new dimension, as `torch.stack`."""
    dim = dim + len(parts[0].shape) + 1 if parts and dim < 0 else dim
    return joined([part.reshaped(*part.shape[:dim], 1, *part.shape[dim:]) for part in parts], dim)
