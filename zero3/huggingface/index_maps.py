"""Index maps tell which element of which source each element of a tensor is, after cuts, joins,
reshapes and transpositions.

They hold integers and no values. With a map a rank finds the elements that its slice needs,
although a checkpoint's tensors are rearranged in the model, and no tensor has to be whole for that.
Tensors without values record maps, through the operations with which transformers converts files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from types import EllipsisType, MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..checkpoint.lazy import Lazy

__all__: list[str] = []

Key = TypeVar("Key")
_LOOKED_UP = 1 << 20  # elements together
_AT_ONCE = 1 << 18  # grains are looked up together, so that tables of indices stay small
# elements; if extents are shorter, looking up single elements is faster than reading ranges
LONG_EXTENT = 1 << 10
# if a span has this many times the elements that are wanted, the whole tensor is read instead, once
_WASTE = 4


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
        last = -(-stop // self.grain)
        for low in range(start // self.grain, last, _AT_ONCE):
            begins = torch.arange(low, min(low + _AT_ONCE, last), dtype=torch.int64) * self.grain
            numbers, at = self.locate(begins)
            new = torch.ones(len(begins), dtype=torch.bool)
            new[1:] = (numbers[1:] != numbers[:-1]) | (at[1:] != at[:-1] + self.grain)
            edges = [*new.nonzero().flatten().tolist(), len(begins)]
            for left, right in pairwise(edges):
                begin, end = int(begins[left]), min(int(begins[right - 1]) + self.grain, stop)
                source, first = self.sources[int(numbers[left])], max(start, begin)
                yield Extent(first, source, int(at[left]) + first - begin, end - first)

    def fill(
        self,
        out: Tensor,
        start: int,
        read: Callable[[Key, int, Tensor], object],
        look_up: Callable[[Key, Tensor], Tensor],
    ) -> None:
        """Fills `out` `[n]` with the elements from number `start` on: by ranges, with
        `read(source, first, target)`, or one by one, which `look_up(source, places)` returns.
        """
        stop = start + out.numel()
        if self.is_by_ranges:
            for extent in self.extents(start, stop):
                first = extent.start - start
                read(extent.source, extent.at, out[first : first + extent.length])
            return
        for low in range(start, stop, _LOOKED_UP):
            numbers, at = self.locate(torch.arange(low, min(low + _LOOKED_UP, stop)))
            piece = torch.empty(len(at), dtype=out.dtype)  # on the host: one copy to a device
            for number, source in enumerate(self.sources):
                if (mine := numbers == number).any():
                    piece[mine] = look_up(source, at[mine]).to(piece)
            out[low - start : low - start + len(at)] = piece

    def blank(self) -> Tensor:
        """A tensor of this shape without values. Of its views `View` makes maps."""
        return torch.empty(self.shape, device="meta")


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


class View(IndexMap[Key]):
    """The map of a view of a contiguous tensor: torch tells at which elements it looks."""

    def __init__(self, inner: IndexMap[Key], view: Tensor) -> None:
        self._inner, self._first = inner, int(view.storage_offset())
        # size and stride of each dimension, the last one first. Those that lie as one are one
        steps: list[tuple[int, int]] = []
        for size, stride in zip(reversed(view.shape), reversed(view.stride()), strict=True):
            if steps and stride == math.prod(steps[-1]):
                steps[-1] = size * steps[-1][0], steps[-1][1]
            elif size != 1:
                steps.append((size, stride))
        side_by_side = steps[0][0] if steps and steps[0][1] == 1 else 1
        apart = (stride for _, stride in steps if stride != 1)
        grain = math.gcd(inner.grain, self._first, side_by_side, *apart)
        super().__init__(view.shape, inner.sources, grain)
        self._steps = steps

    def locate(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        there = torch.full_like(flat, self._first)
        for size, stride in self._steps:
            there += flat.remainder(size).mul_(stride)
            flat = flat.div(size, rounding_mode="floor")
        return self._inner.locate(there)


class Joined(IndexMap[Key]):
    """The map of tensors that are joined along a dimension, as by `torch.cat`. Raises ValueError if
    there is nothing to join, or sizes differ in another dimension.
    """

    def __init__(self, parts: Sequence[IndexMap[Key]], dim: int) -> None:
        if not parts:
            raise ValueError("there is nothing to join")
        self._parts, shape = parts, parts[0].shape
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"there is no dimension {dim} in {shape}")
        dim %= len(shape)
        others = {(len(part.shape), *part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
        if len(others) > 1:
            shapes = ", ".join(str(part.shape) for part in parts[:4])
            raise ValueError(f"tensors {shapes} can't be joined along dimension {dim}")
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


def stacked(parts: Sequence[IndexMap[Key]], dim: int) -> IndexMap[Key]:
    """Joins tensors along a new dimension, as `torch.stack`."""
    return Joined([View(part, part.blank().unsqueeze(dim)) for part in parts], dim)


class SliceReader:
    """Reads ranges if elements lie side by side, and otherwise through a buffer that holds a span
    of one stored tensor, or all of it.
    """

    # the last span: its tensor, its first element, its values
    _span: tuple[Lazy, int, Tensor] | None = None

    def read(self, index_map: IndexMap[Lazy], start: int, target: Tensor) -> None:
        """Reads elements `[start, start + n)` of the flattened tensor into `target` `[n]`,
        converted to its dtype and device.
        """
        index_map.fill(target, start, lambda s, first, into: s.read(first, into), self._look_up)

    def _look_up(self, stored: Lazy, wanted: Tensor) -> Tensor:
        first, last = int(wanted.min()), int(wanted.max())
        if self._span is not None:
            source, begin, values = self._span
            if source is stored and begin <= first and last < begin + len(values):
                return values[wanted - begin]
        if last - first >= _WASTE * len(wanted):
            first, last = 0, stored.numel - 1
        self._span = None  # its memory is free before the next span takes some
        values = torch.empty(last - first + 1, dtype=stored.dtype)
        stored.read(first, values)
        self._span = stored, first, values
        return values[wanted - first]


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
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
