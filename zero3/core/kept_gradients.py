"""Gradients that wait for a later backward: under `no_sync`, and at stage 1. What is done to them meanwhile."""

from __future__ import annotations

import weakref
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import Node

from .chunk import Chunk, Part
from .gradient_buffer import GradientBuffer
from .gradient_types import TOKENS, DeferredGradient, DefersReductions, accumulate_beside, scale_gradient

__all__: list[str] = []


class KeptGradients:
    """The gradients of a chunk's parameters that no backward has reduced yet."""

    def __init__(self, chunk: Chunk, dtype: torch.dtype) -> None:
        self.pending = False  # gradients have come in, in this backward, that no backup has taken
        self.owed = False  # an earlier backward has left its reduction to a later one
        self._chunk = chunk
        self._dtype = dtype  # of sums
        self._buffer = self._new_buffer()
        self._kept: list[Part] = []  # those with a gradient when the sum was kept: it goes with theirs
        self._accumulators: dict[int, Node | None] = {}  # of parts whose gradient was ever deferred

    def _new_buffer(self) -> GradientBuffer:
        return GradientBuffer(self._chunk.layout, self._chunk.shard, self._dtype)

    def keep(self, layer: DefersReductions) -> None:
        """Leaves what has come in for a later backward. Until then the chunk's gradient is one that an optimizer can't use."""
        if not self._buffer.empty:
            self._buffer.flat()
        self.pending, self.owed = False, True
        for part in self._chunk.parts:
            parameter = part.parameter
            if parameter.requires_grad:
                self._accumulators.setdefault(id(parameter), accumulate_beside(parameter))
                parameter.grad = DeferredGradient.like(parameter, weakref.ref(layer))
            if parameter.grad is not None:
                vars(parameter.grad).pop(TOKENS, None)
        self._kept = [part for part in self._chunk.parts if part.start < part.stop and part.parameter.grad is not None]

    @property
    def unseen(self) -> bool:
        """Whether what is kept belongs to gradients of other ranks only, so that nobody here could zero them."""
        return self.owed and not self._kept

    def forget_zeroed(self) -> bool:
        """Between backwards: drops what was kept, if the gradients that it belongs to have been zeroed since."""
        for part in self._kept:
            now = part.parameter.grad
            if now is None or (isinstance(now, DeferredGradient) and now.zeroed):
                self.drop()
                return True
        return False

    def scale(self, factor: Tensor) -> None:
        """Multiplies the chunk's gradient, and what is kept for it, by `factor`, 0-dim."""
        self._scale(factor, self._buffer.full)

    def _scale(self, factor: Tensor, kept: Tensor | None) -> None:
        if kept is not None:
            kept.mul_(factor)
        for part in self._chunk.parts:
            gradient = part.parameter.grad
            gradient = gradient.earlier if isinstance(gradient, DeferredGradient) else gradient
            if gradient is not None:
                scale_gradient(gradient, factor)

    def noted_tokens(self) -> Tensor | None:
        """Over how many tokens the chunk's gradient is the mean, as far as `note_tokens` has told; 0-dim."""
        notes = (getattr(part.parameter.grad, TOKENS, None) for part in self._chunk.parts)
        return next((note[0] for note in notes if note is not None), None)

    def note_tokens(self, total: Tensor) -> None:
        """The chunk's gradient is now the mean over `total` tokens, 0-dim."""
        for part in self._chunk.parts:
            if part.parameter.grad is not None:
                setattr(part.parameter.grad, TOKENS, (total, part.parameter.grad._version))

    def drop(self) -> None:
        """What has come in or was kept, and is not reduced."""
        self._buffer, self._kept = self._new_buffer(), []
        self.pending = self.owed = False
        for part in self._chunk.parts:
            if isinstance(deferred := part.parameter.grad, DeferredGradient):
                deferred.leave(part.parameter, partial(self._typed, part=part))

    def _typed(self, gradient: Tensor, part: Part) -> Tensor:
        """As the gradient of `part` has to be: see `gradient_types`."""
        raise NotImplementedError
