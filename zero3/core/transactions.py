"""Backwards that can be rolled back: their gradients are staged, and join the chunk's gradient at a commit."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from .chunk import Part
from .gradient_buffer import GradientBuffer
from .gradient_reducer import GradientReducer, LayerGradients, Sending
from .gradient_types import TOKENS, DeferredGradient, DefersReductions

__all__: list[str] = []


@dataclass(slots=True)
class _Before:
    """The state before a transaction, for a rollback. The transaction does not write into these tensors."""

    buffer: GradientBuffer
    kept: list[tuple[Part, Tensor]]
    owed: bool
    tokens: list[object]  # one for each part
    factor: Tensor | None = None  # the argument of `scale`, applied at the commit
    total: Tensor | None = None  # the argument of `note_tokens`, noted at the commit
    merged: bool = False  # whether `buffer` has been added to the transaction's own sum


class TransactionalReducer(GradientReducer):
    """A reducer with transactions. The first gradient after a commit begins one, and `commit` or `roll_back` ends it.

    Until the commit, the chunk's gradient and the kept gradients of earlier backwards do not change.
    """

    _before: _Before | None = None  # the state before the present transaction
    _staged: tuple[tuple[Tensor, Tensor], ...] = ()  # the arguments of `_take`, for the commit

    @property
    def undecided(self) -> bool:  # type: ignore[override]
        return self._before is not None

    def _begin(self) -> None:
        if self._before is None:
            tokens = [getattr(part.parameter.grad, TOKENS, None) for part in self._chunk.parts]
            self._before = _Before(self._buffer, self._kept, self.owed, tokens)
            self._buffer = self._new_buffer()

    def _merge_earlier(self) -> None:
        """Adds the kept gradients of earlier backwards to the transaction's own sum."""
        self._begin()
        before = self._before
        if before is not None and not before.merged and not before.buffer.empty:
            before.merged = True
            self._buffer.merge(before.buffer, before.factor)

    def add(self, index: int, gradient: Tensor) -> None:
        self._begin()
        super().add(index, gradient)

    def prepare(self, communicator: Communicator) -> Sending:
        self._merge_earlier()
        return super().prepare(communicator)

    def keep(self, layer: DefersReductions) -> None:
        self._merge_earlier()
        super().keep(layer)

    def scale(self, factor: Tensor) -> None:
        self._begin()
        if self._before is not None:
            self._before.factor = factor if self._before.factor is None else self._before.factor * factor

    def note_tokens(self, total: Tensor) -> None:
        if self._before is not None:
            self._before.total = total
        else:
            super().note_tokens(total)

    def _take(self, landed: Tensor, summed: Tensor) -> None:
        self._staged = (*self._staged, (landed, summed))

    def drop(self) -> None:
        super().drop()
        self._before, self._staged = None, ()

    def abandon(self) -> None:
        self.roll_back()

    def give_up(self) -> None:
        self.roll_back()

    @torch.no_grad()
    def commit(self) -> None:
        """Adds the transaction's gradients to the chunk's gradient, and ends it."""
        before, self._before = self._before, None
        if before is None:
            return
        if not before.merged:  # no backward reached this chunk, or there was nothing to merge
            self._buffer = before.buffer if self._buffer.empty else self._buffer
        if before.factor is not None:
            self._scale(before.factor, None if before.merged else before.buffer.full)
        staged, self._staged = self._staged, ()
        for landed, summed in staged:
            super()._take(landed, summed)
        if before.total is not None:
            self.note_tokens(before.total)

    def end_backward(self, layer: LayerGradients) -> None:
        if not layer.holds:
            self.commit()
            return
        # an optimizer must not use the chunk's gradient until the `step_guard` has decided
        for part in self._chunk.parts if self._before is not None else ():
            if part.parameter.requires_grad and not isinstance(part.parameter.grad, DeferredGradient):
                part.parameter.grad = DeferredGradient.like(part.parameter, weakref.ref(layer))

    def roll_back(self) -> None:
        """Restores the state before the transaction, and ends it."""
        before, self._before, self._staged = self._before, None, ()
        if before is None:
            return
        self.pending = False
        self._buffer, self._kept, self.owed = before.buffer, before.kept, before.owed
        for part, left in self._kept:
            if isinstance(part.parameter.grad, DeferredGradient):
                part.parameter.grad = left
        for part, tokens in zip(self._chunk.parts, before.tokens, strict=True):
            if isinstance(part.parameter.grad, DeferredGradient) and not self.owed:
                part.parameter.grad = part.parameter.grad.earlier
            if part.parameter.grad is not None and tokens is not None:
                setattr(part.parameter.grad, TOKENS, tokens)


def hold(gradients: LayerGradients) -> None:
    """From now on a `step_guard` commits or rolls back the gradients of backwards."""
    gradients.holds += 1
    _exchange(gradients, TransactionalReducer)
    for reducer in gradients.reducers.values():
        reducer.watch(gradients)


def let_go(gradients: LayerGradients) -> None:
    """Called when the `step_guard` is over: the gradients that it did not roll back are committed."""
    gradients.holds -= 1
    if not gradients.holds:
        gradients.end_backward()
        _exchange(gradients, gradients.reducer)


def _exchange(gradients: LayerGradients, kind: type[GradientReducer]) -> None:
    """Replaces the reducers by reducers of class `kind` with the same state. For between backwards."""
    for chunk, before in gradients.reducers.items():
        if type(before) is not kind:
            after = kind.__new__(kind)
            vars(after).update(vars(before))
            gradients.reducers[chunk] = after
