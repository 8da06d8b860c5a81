"""Gradients that are kept for a later reduction, under `no_sync` and at stage 1."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .chunk import Chunk, Part
from .gradient_buffer import GradientBuffer
from .gradient_types import (
    TOKENS,
    DeferredGradient,
    DefersReductions,
    accumulate_beside,
    scale_gradient,
)

__all__: list[str] = []


class KeptGradients:
    """The gradients of a chunk's parameters that are not reduced yet."""

    def __init__(self, chunk: Chunk, dtype: torch.dtype, added_as: torch.dtype) -> None:
        self.pending = False  # whether this backward has added gradients that are not backed up yet
        self.owed = False  # whether an earlier backward has kept gradients that are not reduced yet
        self._chunk = chunk
        self._dtype = dtype  # the dtype of sums within a backward
        self.added_as = added_as  # the dtype in which backwards are added up
        self._buffer = self._new_buffer()
        # 1-D [S], where chunks have replicas: the sum of one replica, not yet summed over all
        self.partial: Tensor | None = None
        # parts, and the gradients that the last `keep` left with them
        self._kept: list[tuple[Part, Tensor]] = []
        # by id of the part's parameter, if its gradient was ever deferred
        self._accumulators: dict[int, Node | None] = {}

    def _new_buffer(self) -> GradientBuffer:
        return GradientBuffer(self._chunk.layout, self._dtype, self._chunk.device)

    def watch(self, layer: DefersReductions) -> None:
        """From now on this chunk sees gradients that flow straight into it, as those of a penalty
        over parameters do.
        """
        for part in self._chunk.parts:
            # each call adds hooks
            if part.parameter.requires_grad and id(part.parameter) not in self._accumulators:
                self._accumulators[id(part.parameter)] = accumulate_beside(
                    part.parameter, weakref.ref(layer)
                )

    def keep(self, layer: DefersReductions) -> None:
        """Keeps the gradients for a later reduction. Until then the chunk's gradient is a
        `DeferredGradient`, which has no values.
        """
        self._buffer.keep(self.added_as)
        self.pending, self.owed = False, True
        self.watch(layer)
        for part in self._chunk.parts:
            parameter = part.parameter
            if parameter.requires_grad:
                parameter.grad = DeferredGradient.like(parameter, weakref.ref(layer))
            if parameter.grad is not None:
                vars(parameter.grad).pop(TOKENS, None)
        held = [(part, part.parameter.grad) for part in self._chunk.parts if part.start < part.stop]
        self._kept = [(part, gradient) for part, gradient in held if gradient is not None]

    @property
    def unseen(self) -> bool:
        """Whether gradients are kept, but this rank has no part of the chunk that the caller could
        zero.
        """
        return self.owed and not self._kept

    def forget_zeroed(self) -> bool:
        """Drops kept gradients if the caller has zeroed the chunk's gradient since. Returns whether
        it did. For between backwards.
        """
        for part, left in self._kept:  # another gradient in its place came after it was dropped
            if part.parameter.grad is not left or (
                isinstance(left, DeferredGradient) and left.zeroed
            ):
                self.drop()
                return True
        return False

    def scale(self, factor: Tensor) -> None:
        """Multiplies the chunk's gradient, and the kept gradients, by the 0-dim `factor`."""
        self._scale_partial(factor)
        self._scale(factor, self._buffer)

    def _scale_partial(self, factor: Tensor) -> None:
        if self.partial is not None:
            # another tensor: a transaction may go back to this one
            self.partial = self.partial * factor

    def _scale(self, factor: Tensor, kept: GradientBuffer | None) -> None:
        if kept is not None:
            kept.scale(factor)
        for part in self._chunk.parts:
            gradient = part.parameter.grad
            gradient = gradient.earlier if isinstance(gradient, DeferredGradient) else gradient
            if gradient is not None:
                scale_gradient(gradient, factor)

    @property
    def earlier(self) -> list[Tensor]:
        """The gradients that the next backward adds to."""
        return [
            part.parameter.grad for part in self._chunk.parts if part.parameter.grad is not None
        ]

    def noted_tokens(self) -> Tensor | None:
        """The number of tokens that the chunk's gradient is the mean over, 0-dim. None if
        `note_tokens` has not set it.
        """
        notes = (getattr(part.parameter.grad, TOKENS, None) for part in self._chunk.parts)
        return next((note[0] for note in notes if note is not None), None)

    def note_tokens(self, total: Tensor) -> None:
        """Notes that the chunk's gradient is the mean over `total` tokens, 0-dim."""
        for part in self._chunk.parts:
            if part.parameter.grad is not None:
                setattr(part.parameter.grad, TOKENS, (total, part.parameter.grad._version))

    def drop(self) -> None:
        """Drops all gradients that are not reduced yet."""
        self._buffer, self._kept, self.partial = self._new_buffer(), [], None
        self.pending = self.owed = False
        for part in self._chunk.parts:
            if isinstance(deferred := part.parameter.grad, DeferredGradient):
                deferred.leave(part.parameter, partial(self._typed, part=part))

    def _typed(self, gradient: Tensor, part: Part) -> Tensor:
        """`gradient` in the type that the gradient of `part` has. See `gradient_types`."""
        raise NotImplementedError
