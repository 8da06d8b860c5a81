"""Heads of all parts of a sequence come to the ranks that compute them, and go back.

    part of a sequence, all heads   [B, H, part, D]
      | there                       to each rank its heads, of this rank's part
    the sequence, some heads        [B, H / sp, S, D]
      | back                        to each rank its part, of these heads
    part of a sequence, all heads

Backward goes the other way. What is sent together is one transfer, on the compute stream.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from .heads import Heads

__all__: list[str] = []


class Direction(IntEnum):
    THERE = 0
    BACK = 1


DOING = ("exchanging parts of sequences for heads in", "exchanging heads for parts of sequences in")


@dataclass(frozen=True, slots=True)
class Measured:
    """The parts of one forward's sequences."""

    batch: int  # B
    lengths: tuple[int, ...]  # of each rank's part
    index: int  # which part is this rank's
    positions: Tensor | None = None  # [B, S], if given
    mask: Tensor | None = None  # [B, S], True where a token counts, if given
    packed: Tensor | None = None  # [B, S], which sequence a token belongs to, if there are several

    @property
    def part(self) -> int:
        return self.lengths[self.index]

    @property
    def whole(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tensors go one way together. `heads`: of each. `widths`: bytes of a head and token."""

    layer: Any  # the root's own
    way: Direction
    heads: tuple[Heads, ...]
    widths: tuple[int, ...]
    parts: Any = field(compare=False, repr=False)
    mine: Any = field(default=None, compare=False, repr=False)  # (Measured, tensors)
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"is {DOING[self.way]} {self.layer.label}"

    def perform(self) -> list[Tensor]:
        measured, tensors = self.mine
        flat = torch.cat(self._sent(measured, tensors))
        return self._taken(measured, tensors, self._swap(measured, flat))

    def take_part(self) -> None:
        """With zeros, after a failure."""
        measured = self.parts.present
        sent, _ = self._sizes(measured)
        zeros = torch.zeros(sum(sent), dtype=torch.uint8, device=self.layer.device)
        self._swap(measured, zeros)

    @property
    def received(self) -> int:
        """The bytes that come from other ranks."""
        measured: Measured = self.parts.present if self.mine is None else self.mine[0]
        _, came = self._sizes(measured)
        return sum(came) - came[measured.index]

    def _sizes(self, of: Measured) -> tuple[list[int], list[int]]:
        """The bytes to each rank, and from each."""
        for_heads = [of.batch * of.part * self._token(rank) for rank in range(len(of.lengths))]
        for_parts = [of.batch * length * self._token(of.index) for length in of.lengths]
        return (for_heads, for_parts) if self.way is Direction.THERE else (for_parts, for_heads)

    def _token(self, rank: int) -> int:
        """The bytes of a token that `rank` computes with."""
        each = zip(self.heads, self.widths, strict=True)
        return sum(len(heads[rank]) * width for heads, width in each)

    def _sent(self, of: Measured, tensors: list[Tensor]) -> list[Tensor]:
        """Rank by rank, the bytes of all tensors."""
        found: list[Tensor] = []
        starts = (0, *accumulate(of.lengths))
        for rank, length in enumerate(of.lengths):
            parts = (
                _some(tensor, heads[rank])
                if self.way is Direction.THERE
                else tensor.narrow(2, starts[rank], length)
                for tensor, heads in zip(tensors, self.heads, strict=True)
            )
            found += [part.contiguous().view(-1).view(torch.uint8) for part in parts]
        return found

    def _swap(self, of: Measured, flat: Tensor) -> list[Tensor]:
        """Returns what has come from each rank."""
        sent, received = self._sizes(of)
        into = flat.new_empty(sum(received))
        bounds, places = ((0, *accumulate(each)) for each in (sent, received))
        self.parts.swap(self.way, into, flat, bounds, places)
        return list(torch.split(into, received))

    def _taken(self, of: Measured, like: list[Tensor], came: list[Tensor]) -> list[Tensor]:
        """The tensors whose pieces have come. `like`: what was sent."""
        pieces: list[list[Tensor]] = [[] for _ in like]
        for rank, own in enumerate(came):
            at = 0
            for into, tensor, heads, width in zip(
                pieces, like, self.heads, self.widths, strict=True
            ):
                there = self.way is Direction.THERE
                count = len(heads[of.index if there else rank])
                length = of.lengths[rank] if there else of.part
                shape = of.batch, count, length, tensor.shape[3]
                size = of.batch * count * length * width
                into.append(own[at : at + size].view(tensor.dtype).view(shape))
                at += size
        if self.way is Direction.THERE:
            return [torch.cat(each, 2) for each in pieces]
        return [_joined(each, heads) for each, heads in zip(pieces, self.heads, strict=True)]


def _some(tensor: Tensor, heads: tuple[int, ...]) -> Tensor:
    if not heads or heads == tuple(range(heads[0], heads[-1] + 1)):
        return tensor.narrow(1, heads[0] if heads else 0, len(heads))
    return torch.cat([tensor.narrow(1, head, 1) for head in heads], 1)


def _joined(pieces: list[Tensor], heads: Heads) -> Tensor:
    """All ranks' pieces, head by head; a head that several ranks had is added up in float32."""
    flat = [head for own in heads for head in own]
    if flat == list(range(len(flat))):
        return torch.cat(pieces, 1)
    first = pieces[0]
    wide = torch.promote_types(torch.float32, first.dtype)
    batch, _, part, width = first.shape
    total = first.new_zeros((batch, max(flat) + 1, part, width), dtype=wide)
    for piece, own in zip(pieces, heads, strict=True):
        for place, head in enumerate(own):
            total[:, head].add_(piece[:, place])
    return total.to(first.dtype)


class _Swapped(torch.autograd.Function):
    """Tensors that go one way together, and their gradients the other way."""

    @staticmethod
    def forward(
        ctx: Any, parts: Any, measured: Measured, way: Direction, heads: Any, *tensors: Tensor
    ) -> Any:
        ctx.rest = parts, measured, Direction(1 - way), heads
        return tuple(_conduct(parts, measured, way, heads, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        parts, measured, way, heads = ctx.rest
        return None, None, None, None, *_conduct(parts, measured, way, heads, gradients)


def _conduct(
    parts: Any, measured: Measured, way: Direction, heads: tuple[Heads, ...], tensors: Any
) -> list[Tensor]:
    layer = parts.layer()
    widths = tuple(each.shape[3] * each.element_size() for each in tensors)
    what = Exchange(layer, way, heads, widths, parts, (measured, list(tensors)))
    found: list[Tensor] = layer.conductor.conduct(what)
    return found


def swap(
    parts: Any, measured: Measured, way: Direction, heads: tuple[Heads, ...], *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Each `[B, H, part, D]` of THERE becomes `[B, heads, S, D]`, and the other way."""
    found: tuple[Tensor, ...] = _Swapped.apply(parts, measured, way, heads, *tensors)  # type: ignore[no-untyped-call]
    return found
