"""A tensor that lies in files until somebody asks for some of its elements."""

from __future__ import annotations

import bisect
import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add, gt, lt

import torch
from torch import Tensor

__all__: list[str] = []

STAGE_BYTES = 1 << 22  # of the buffer between a file and a chunk; a multiple of every dtype's size


@dataclass(frozen=True, eq=False)
class Lazy:
    """`read(start, into)` fills `into` `[n]`, of this dtype, with elements `[start, start + n)` of
    the flattened tensor. `name`, `file`: where it lies in a safetensors file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[int, Tensor], object]
    name: str = ""
    file: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes, a few MB at a time; each piece has memory of its own."""
        step = STAGE_BYTES // self.dtype.itemsize
        for start in range(0, self.numel, step):
            piece = torch.empty(min(step, self.numel - start), dtype=self.dtype)
            self.read(start, piece)
            yield bytes_of(piece)

    def tensor(self) -> Tensor:
        """All of it, in memory."""
        value = torch.empty(self.shape, dtype=self.dtype)
        if value.numel():
            self.read(0, value.view(-1))
        return value

    def part(self, start: int, stop: int) -> Lazy:
        """Elements of it, flattened; zeros beyond its end."""

        def read(first: int, into: Tensor) -> None:
            count = max(0, min(into.numel(), self.numel - start - first))
            into[count:] = 0
            if count:
                self.read(start + first, into[:count])

        return Lazy(self.dtype, (stop - start,), read)


def as_lazy(value: Lazy | Tensor) -> Lazy:
    """A tensor is in memory already."""
    if isinstance(value, Lazy):
        return value
    flat = value.detach().reshape(-1)
    return Lazy(
        value.dtype,
        tuple(value.shape),
        lambda start, into: into.copy_(flat[start : start + into.numel()]),
    )


def joined(dtype: torch.dtype, shape: tuple[int, ...], parts: Sequence[Lazy]) -> Lazy:
    """The elements of one after another, from the first; what of the last lies beyond the whole is
    padding.
    """
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.numel)

    def read(start: int, into: Tensor) -> None:
        stop = start + into.numel()
        for number in range(bisect.bisect_right(ends, start) - 1, len(parts)):
            low, high = max(start, ends[number]), min(stop, ends[number + 1])
            if low < high:
                parts[number].read(low - ends[number], into[low - start : high - start])

    return Lazy(dtype, shape, read)


Sizes = tuple[int, ...]
Block = tuple[Sizes, Lazy]  # where a part of a tensor begins, and its values


def fills(
    shape: tuple[int, ...], blocks: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]
) -> bool:
    """Whether blocks, by offsets and sizes, fill a tensor, and no two of them overlap."""
    covered, spans = 0, list[tuple[tuple[int, ...], tuple[int, ...]]]()
    for begin, size in blocks:
        if {len(begin), len(size)} != {len(shape)} or min((*begin, *size), default=0) < 0:
            return False
        end = tuple(map(add, begin, size))
        if any(map(gt, end, shape)):
            return False
        covered += math.prod(size)
        spans += [(begin, end)] if 0 not in size else []
    spans.sort()
    for number, (begin, end) in enumerate(spans):
        for other, its_end in islice(spans, number + 1, None):
            if other[:1] >= end[:1]:
                break  # it begins behind this one, and so do the rest
            if all(map(lt, other, end)) and all(map(lt, begin, its_end)):
                return False
    return covered == math.prod(shape)


def assembled(dtype: torch.dtype, shape: tuple[int, ...], blocks: Iterable[Block]) -> Lazy:
    """A tensor from blocks that lie side by side in it, in any number of dimensions."""
    runs = [_Runs(shape, *block) for block in blocks]

    def read(start: int, into: Tensor) -> None:
        for each in runs:
            each.read(start, into)

    return Lazy(dtype, shape, read)


class _Runs:
    """A block as it lies in the flattened tensor: runs of equal length, in order, which are the
    flattened block one after another.
    """

    def __init__(self, shape: tuple[int, ...], offsets: tuple[int, ...], values: Lazy) -> None:
        sizes = values.shape
        split = max(
            (at for at, (own, all_) in enumerate(zip(sizes, shape, strict=True)) if own != all_),
            default=0,
        )
        self._strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
        self._outer = sizes[:split]
        self._length = math.prod(sizes[split:])
        self._count = math.prod(self._outer) if values.numel else 0
        self._first = sum(a * b for a, b in zip(offsets, self._strides, strict=True))
        self._values = values

    def _begin(self, number: int) -> int:
        begin = self._first
        for size, stride in reversed(list(zip(self._outer, self._strides, strict=False))):
            number, index = divmod(number, size)
            begin += index * stride
        return begin

    def read(self, start: int, into: Tensor) -> None:
        stop = start + into.numel()
        for number in range(
            bisect.bisect_left(range(self._count), start - self._length + 1, key=self._begin),
            self._count,
        ):
            begin = self._begin(number)
            if begin >= stop:
                return
            low, high = max(start, begin), min(stop, begin + self._length)
            self._values.read(number * self._length + low - begin, into[low - start : high - start])


def resolved(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy if its memory holds the conjugate or the negative of it, as that of
    `tensor.conj()` does.
    """
    return tensor.resolve_conj().resolve_neg()


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous, `resolved` CPU tensor, to read or write, without a copy.
    The view keeps the tensor alive.
    """
    if not tensor.numel():
        return memoryview(b"")
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.keeps_alive = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
