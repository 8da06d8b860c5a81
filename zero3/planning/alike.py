"""What a plan leaves out because it is as what it does: of many tiles, and of many slices in which
a matrix is decoded, all but a few.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..sequences.tiles import Compute, joined

__all__: list[str] = []

# tiles that run: the first; the last but one, which has the others' gradients of weights to add its
# own to; and the last, which may be shorter
_RUN = 3


class Alike:
    """`times`: how often what runs now would run."""

    def __init__(self) -> None:
        self.times = 1.0

    @contextmanager
    def _for(self, times: float) -> Iterator[None]:
        before, self.times = self.times, self.times * times
        try:
            yield
        finally:
            self.times = before

    def first(self, starts: range) -> Iterator[int]:
        """Of the slices in which a matrix is decoded: a large one has hundreds."""
        with self._for(max(1.0, (starts.stop - starts.start) / starts.step)):
            yield from starts[:1]

    def join(self, whole: Tensor, length: int, compute: Compute) -> Tensor:
        """As `joined`, at each moment with the bytes that all tiles would hold."""
        tiles = -(-whole.shape[-2] // length)
        if (left_out := tiles - _RUN) < 1:
            return joined(whole, length, compute)
        ends = whole.shape[-2] - length * (tiles - 1)
        first, middle, other, last = torch.split(
            whole, [length, left_out * length, length, ends], -2
        )
        made = [compute(first)]
        made.append(_LeftOut.apply(middle, made[0]))  # type: ignore[no-untyped-call]
        with self._for(times := 1 + left_out):
            made.append(compute(other))
        made.append(compute(last))
        if made[0].requires_grad:  # backward comes from the last to the first
            made[2].register_hook(partial(self._begin, times))  # type: ignore[no-untyped-call]
            made[0].register_hook(partial(self._begin, 1.0))  # type: ignore[no-untyped-call]
        return torch.cat(made, -2)

    def _begin(self, times: float, gradient: Tensor) -> None:
        self.times = times


class _LeftOut(torch.autograd.Function):
    """The outputs of tiles, and in backward the gradients of their inputs."""

    @staticmethod
    def forward(ctx: Any, tiles: Tensor, made: Tensor) -> Tensor:
        ctx.of_tiles = tiles.shape, tiles.dtype
        return made.new_empty(*tiles.shape[:-1], made.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shape, dtype = ctx.of_tiles
        return gradient.new_empty(shape, dtype=dtype), None
