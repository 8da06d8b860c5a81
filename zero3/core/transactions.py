"""Backwards that can be rolled back: their gradients are staged, and join the chunk's gradient at a
commit.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from .chunk import Part
from .gradient_buffer import GradientBuffer, Sending
from .gradient_reducer import GradientReducer, LayerGradients
from .gradient_types import DeferredGradient, DefersReductions

__all__: list[str] = []


@dataclass(slots=True)
class _Before:
    """The state before a transaction, for a rollback. The transaction does not write into these
    tensors.
    """

    buffer: GradientBuffer
    kept: list[tuple[Part, Tensor]]
    owed: bool
    gradients: list[Tensor | None]  # one for each part
    partial: Tensor | None
    factor: Tensor | None = None  # the argument of `scale`, applied at the commit
    total: Tensor | None = None  # the argument of `note_tokens`, noted at the commit
    merged: bool = False  # whether `buffer` has been added to the transaction's own sum


class TransactionalReducer(GradientReducer):
    """A reducer with transactions. The first gradient after a commit begins one, and `commit` or
    `roll_back` ends it.

    Until the commit, the chunk's gradient and the kept gradients of earlier backwards do not
    change. A `step_guard` begins the transaction, and puts deferred gradients in the place of the
    chunk's. So nobody can use those before the commit; and if they are zeroed, this is seen
    (`disturbed`), and the ones of before are still there.
    """

    _before: _Before | None = None  # the state before the present transaction
    _staged: tuple[tuple[Tensor, Tensor], ...] = ()  # the arguments of `_take`, for the commit
    # in a `step_guard`: what stands for the parts' gradients until the commit
    _placed: tuple[tuple[Part, Tensor], ...] | None = None
    _disturbed = False
    # kept, so that a later `step_guard` begins without an allocation, which may fail on one rank
    # alone
    _nothing: Tensor | None = None

    @property
    def undecided(self) -> bool:  # type: ignore[override]
        before = self._before
        return before is not None and (
            bool(self._staged) or before.factor is not None or self._kept is not before.kept
        )

    @property
    def disturbed(self) -> bool:
        """Whether the caller has zeroed or replaced the chunk's gradient inside a `step_guard`."""
        self._disturbed = self._disturbed or any(
            part.parameter.grad is not placed
            or (isinstance(placed, DeferredGradient) and placed.zeroed)
            for part, placed in self._placed or ()
        )
        return self._disturbed

    @property
    def earlier(self) -> list[Tensor]:
        gradients = self._before.gradients if self._before is not None else super().earlier
        return [gradient for gradient in gradients if gradient is not None]

    def place(self, layer: DefersReductions) -> None:
        """Until the commit, deferred gradients stand for the chunk's."""
        self._begin()
        for part in self._chunk.parts if not self.disturbed else ():
            if part.parameter.requires_grad and not isinstance(
                part.parameter.grad, DeferredGradient
            ):
                if self._nothing is None:
                    self._nothing = torch.zeros(
                        (), dtype=part.parameter.grad_dtype, device=part.parameter.device
                    )
                part.parameter.grad = DeferredGradient.like(
                    part.parameter, weakref.ref(layer), self._nothing
                )
        self._note_placed()

    def _note_placed(self) -> None:
        placed = [
            (part, part.parameter.grad) for part in self._chunk.parts if part.start < part.stop
        ]
        self._placed = tuple((part, gradient) for part, gradient in placed if gradient is not None)

    def forget_zeroed(self) -> bool:
        return False if self.disturbed else super().forget_zeroed()

    def _begin(self) -> None:
        if self._before is None:
            gradients = [part.parameter.grad for part in self._chunk.parts]
            self._before = _Before(self._buffer, self._kept, self.owed, gradients, self.partial)
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
        guarded = self._placed is not None and not self.disturbed
        super().keep(layer)
        if guarded:
            self._note_placed()

    def scale(self, factor: Tensor) -> None:
        self._begin()
        self._scale_partial(factor)
        if self._before is not None:
            self._before.factor = (
                factor if self._before.factor is None else self._before.factor * factor
            )

    def note_tokens(self, total: Tensor) -> None:
        if self._before is not None:
            self._before.total = total
        else:
            super().note_tokens(total)

    def _take(self, landed: Tensor, summed: Tensor) -> None:
        self._staged = (*self._staged, (landed, summed))

    def drop(self) -> None:
        super().drop()
        self._end()

    def abandon(self) -> None:
        self.roll_back()

    def give_up(self) -> None:
        self.drops = False
        self.roll_back()

    def _end(self) -> None:
        self._before, self._staged, self._placed, self._disturbed = None, (), None, False

    @torch.no_grad()
    def commit(self) -> None:
        """Adds the transaction's gradients to the chunk's gradient, and ends it."""
        before, staged = self._before, self._staged
        self._end()
        if before is None:
            return
        if not before.merged:  # no backward reached this chunk, or there was nothing to merge
            self._buffer = before.buffer if self._buffer.empty else self._buffer
        if before.factor is not None:
            self._scale(before.factor, None if before.merged else before.buffer)
        for landed, summed in staged:
            super()._take(landed, summed)
        for part in self._chunk.parts if not self.owed else ():
            # no backward has reached this chunk
            if isinstance(part.parameter.grad, DeferredGradient):
                part.parameter.grad = part.parameter.grad.earlier
        if before.total is not None:
            self.note_tokens(before.total)

    def end_backward(self, layer: LayerGradients) -> None:
        if layer.holds:
            self.place(layer)
        else:
            self.commit()

    def roll_back(self) -> None:
        """Restores the state before the transaction, and ends it. What the caller has zeroed since
        stays so, unless a guard is open.
        """
        before, guarded, disturbed = self._before, self._placed is not None, self.disturbed
        self._end()
        self._disturbed = disturbed
        if before is None:
            return
        self.pending = False
        self._buffer, self._kept, self.owed, self.partial = (
            before.buffer,
            before.kept,
            before.owed,
            before.partial,
        )
        for part, gradient in zip(self._chunk.parts, before.gradients, strict=True):
            found = part.parameter.grad
            zeroed = isinstance(found, DeferredGradient) and found.zeroed and not guarded
            if isinstance(gradient, DeferredGradient):
                gradient.zeroed = zeroed
            if guarded or isinstance(found, DeferredGradient):
                part.parameter.grad = (
                    None if zeroed and not isinstance(gradient, DeferredGradient) else gradient
                )


def hold(gradients: LayerGradients) -> None:
    """From now on a `step_guard` commits or rolls back the gradients of backwards."""
    gradients.holds += 1
    _exchange(gradients, TransactionalReducer)
    for reducer in gradients.reducers.values():
        reducer.watch(gradients)
    gradients.end_backward()
    for each in gradients.ignored:
        each.held = True
        each.stage()


def let_go(gradients: LayerGradients, *, keep: bool) -> None:
    """Called when the `step_guard` is over: its gradients are committed, or rolled back if not
    `keep`.
    """
    for reducer in gradients.reducers.values() if not keep else ():
        if isinstance(reducer, TransactionalReducer):
            reducer.roll_back()
    gradients.holds -= 1
    for each in gradients.ignored:
        each.held = bool(gradients.holds)
        if not keep:
            each.roll_back()
    if not gradients.holds:
        gradients.end_backward()
        _exchange(gradients, gradients.reducer)


def _exchange(gradients: LayerGradients, kind: type[GradientReducer]) -> None:
    """Replaces the reducers by reducers of class `kind` with the same state. For between
    backwards.
    """
    for chunk, before in gradients.reducers.items():
        if type(before) is not kind:
            after = kind.__new__(kind)
            vars(after).update(vars(before))
            gradients.reducers[chunk] = after
