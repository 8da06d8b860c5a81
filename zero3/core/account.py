"""One chunk's gradients: added up as autograd brings them, sent on their way or kept, and taken
back.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..comm.communicator import Communicator
from .chunk import Chunk, Part
from .chunk_gradient import (
    TOKENS,
    DeferredGradient,
    DefersReductions,
    accumulate,
    accumulate_beside,
    has_hooks,
    no_values_for,
    note_tokens,
    scale_gradient,
)
from .flow import Among, Flow, Travelling
from .gradient_buffer import GradientBuffer
from .reached import Reached, Unreached

__all__: list[str] = []


@dataclass(slots=True)
class _Savepoint:
    """What an account held. Nothing of it is written into until it is gone."""

    buffer: GradientBuffer
    kept: list[tuple[Part, Tensor]]
    owed: bool
    gradients: list[Tensor | None]  # one for each part
    partial: Tensor | None
    factor: Tensor | None = None  # the argument of `scale`, applied at the commit
    total: Tensor | None = None  # the argument of `note_tokens`, noted at the commit
    merged: bool = False  # whether `buffer` has been added to the account's own sum
    # what has landed since, for the commit
    staged: list[tuple[Tensor, Tensor | None, Reached | None]] = field(default_factory=list)


@dataclass(slots=True)
class _Guard:
    """What a `step_guard` needs of an account."""

    always: bool  # whether the account saves without a guard, too
    # what stands for the parts' gradients until the commit
    placed: tuple[tuple[Part, Tensor], ...] | None = None
    disturbed: bool = False
    # kept, so that a later guard begins without an allocation, which may fail on one rank alone
    nothing: Tensor | None = None


class Account:
    """The gradients of a chunk's parameters. `take_room` and `back_up` reduce their sum over ranks
    into the chunk's own gradient; `keep`, instead of them, leaves it for a later reduction. If the
    chunk's gradient is zeroed before, what is kept is dropped.

    An account that saves has savepoints. The first gradient after a commit makes one, and `commit`
    or `roll_back` ends it. Until then the chunk's gradient and what earlier backwards have kept do
    not change. A `step_guard` makes the savepoint itself, and puts deferred gradients in the place
    of the chunk's. So nobody can use those before the commit; and if they are zeroed, this is seen
    (`disturbed`), and the ones of before are still there.
    """

    def __init__(
        self,
        chunk: Chunk,
        flow: Flow,
        buffer: GradientBuffer,
        added_as: torch.dtype,
        among: Among,
        *,
        saves: bool,
    ) -> None:
        """`buffer`: an empty one. `added_as`: the dtype of sums over several backwards.
        `among`: the layer's. `saves`: in each backward. (Otherwise inside of a `step_guard` alone.)
        """
        self.chunk = chunk
        self.pending = False  # whether this backward has added gradients that are not backed up yet
        self.owed = False  # whether an earlier backward has kept gradients that are not reduced yet
        # 1-D [S+n], where chunks have replicas: the sum of one replica, not yet summed over all
        self.partial: Tensor | None = None
        self.unreached = Unreached()
        self.flow, self.among = flow, among
        self._buffer, self.added_as = buffer, added_as
        # parts, and the gradients that the last `keep` left with them
        self._kept: list[tuple[Part, Tensor]] = []
        # by id of the part's parameter, if its gradient was ever deferred
        self._accumulators: dict[int, Node | None] = {}
        # whether what lands is dropped at once, so that no hook of the caller's sees it: its
        # backward has raised
        self._drops = False
        # saves: whether the first gradient makes a savepoint
        self.saves = saves
        self._guard = _Guard(saves)
        self._saved: _Savepoint | None = None

    # -- a gradient's way

    def add(self, index: int, gradient: Tensor) -> None:
        """[B4] Adds a gradient of slot number `index`."""
        if self.saves:
            self._save()
        self.pending = True
        self._buffer.add(index, gradient)

    def take_room(self, communicator: Communicator) -> Travelling:
        """[backup 1] Takes the gradients out, and allocates all that their reduction needs."""
        if self.saves:
            self._merge_earlier()
        gradient = self.flow.take_room(self, communicator, self._buffer)
        # only now: if memory has run out, nothing is lost
        self._buffer, self._kept = GradientBuffer(*self._buffer.like), []
        self.pending = self.owed = False
        return gradient

    def exchange_partial(self, summed: Tensor | None) -> Tensor | None:
        """Takes out the sum of one replica that earlier micro-batches left, and leaves `summed`."""
        earlier, self.partial = self.partial, summed
        return earlier

    def land(self, landed: Tensor, exact: Tensor | None, reached: Reached | None) -> None:
        """A gradient `[S]` has come to the end of its way. `exact`: in a wider dtype. `reached`:
        the slots that it is of, None for all.
        """
        if self.saves:
            self._save().staged.append((landed, exact, reached))
        else:
            self._accumulate(landed, exact, reached)

    def _accumulate(self, landed: Tensor, exact: Tensor | None, reached: Reached | None) -> None:
        if self._drops:
            return
        if reached is not None or self.unreached.maybe:
            self.unreached.land(reached, self._zeroed())
        for number, part in enumerate(self.chunk.parts):
            if part.parameter.requires_grad or self._was_kept_for(part):
                gradient = self.flow.typed(part, part.of(landed))
                wider = None if exact is None else part.of(exact)
                if reached is None:
                    accumulate(part.parameter, gradient, wider)
                else:
                    self._accumulate_some(number, gradient, wider, reached)

    def _was_kept_for(self, part: Part) -> bool:
        """Whether the chunk was frozen after gradients were kept. They land as they would have."""
        frozen = part.parameter is self.chunk.shard
        return frozen and isinstance(part.parameter.grad, DeferredGradient)

    def _accumulate_some(
        self, number: int, gradient: Tensor, wider: Tensor | None, reached: Reached
    ) -> None:
        """Of these slots alone."""
        part = self.chunk.parts[number]
        before = _earlier(part.parameter)
        alone = before is None or self.unreached.is_placed(number, before)
        nothing = has_hooks(part.parameter) and part.slots.isdisjoint(reached.slots())
        accumulate(part.parameter, gradient, wider, hooks=not nothing)
        if alone and part.parameter.grad is not None:
            self.unreached.place(number, part.parameter.grad)

    def _zeroed(self) -> frozenset[int]:
        """The slots of parts that have no gradient. Where this rank has parts of some slots alone,
        the others count as zeroed with all of these, since their ranks zero them.
        """
        trained = [
            part
            for part in self.chunk.parts
            if part.parameter.requires_grad or self._was_kept_for(part)
        ]
        zeroed = [part.slots for part in trained if _earlier(part.parameter) is None]
        if len(zeroed) == len(trained):
            return frozenset(range(len(self.chunk.layout.slots)))
        return frozenset().union(*zeroed)

    def settle(self) -> None:
        """Nothing is on its way. A part of which no rank's gradients have reached a slot has none,
        as a parameter of plain torch.
        """
        slots = self.unreached.slots
        for number, part in enumerate(self.chunk.parts):
            placed = self.unreached.is_placed(number, part.parameter.grad)
            if placed and part.slots <= slots:
                part.parameter.grad = None
        self.unreached.forget()

    @property
    def held(self) -> list[Tensor]:
        """The memory of gradients that are not on their way yet."""
        return [*self._buffer.held, *([] if self.partial is None else [self.partial])]

    @property
    def earlier(self) -> list[Tensor]:
        """The gradients that the next backward adds to."""
        if self._saved is not None:
            return [gradient for gradient in self._saved.gradients if gradient is not None]
        gradients = [part.parameter.grad for part in self.chunk.parts]
        return [gradient for gradient in gradients if gradient is not None]

    # -- gradients that are kept (`no_sync`, stage 1)

    def watch(self, layer: DefersReductions) -> None:
        """From now on this chunk sees gradients that flow straight into it, as those of a penalty
        over parameters do.
        """
        for part in self.chunk.parts:
            # each call adds hooks
            if part.parameter.requires_grad and id(part.parameter) not in self._accumulators:
                self._accumulators[id(part.parameter)] = accumulate_beside(
                    part.parameter, weakref.ref(layer)
                )

    def keep(self, layer: DefersReductions) -> None:
        """Keeps the gradients for a later reduction. Until then the chunk's gradient is a
        `DeferredGradient`, which has no values.
        """
        if self.saves:
            self._merge_earlier()
        guarded = self._guard.placed is not None and not self.disturbed
        self._buffer.keep(self.added_as)
        self.pending, self.owed = False, True
        self.watch(layer)
        for part in self.chunk.parts:
            parameter = part.parameter
            # the chunk may have been frozen since
            if parameter.requires_grad or parameter is self.chunk.shard:
                parameter.grad = DeferredGradient.like(parameter, weakref.ref(layer))
            if parameter.grad is not None:
                vars(parameter.grad).pop(TOKENS, None)
        self._kept = self._standing()
        if guarded:
            self._guard.placed = tuple(self._kept)

    def _standing(self) -> list[tuple[Part, Tensor]]:
        held = [(part, part.parameter.grad) for part in self.chunk.parts if part.start < part.stop]
        return [(part, gradient) for part, gradient in held if gradient is not None]

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
        for part, left in self._kept if not self.disturbed else ():
            found = part.parameter.grad
            if isinstance(found, DeferredGradient) and found.stands_for is left:
                continue  # what happens to it is known when `left` comes back
            # another gradient in its place came after it was dropped
            if found is not left or (isinstance(left, DeferredGradient) and left.zeroed):
                self.drop()
                return True
        return False

    # -- what is done to all of them

    def scale(self, factor: Tensor) -> None:
        """Multiplies the chunk's gradient, and the kept gradients, by the 0-dim `factor`."""
        if self.saves:
            self._save()
        if self.partial is not None:
            # another tensor: a savepoint may go back to this one
            self.partial = self.partial.clone()
            self.partial[: self.chunk.shard.numel()].mul_(factor)  # and not the trailer
        if self._saved is not None:
            before = self._saved.factor
            self._saved.factor = factor if before is None else before * factor
        else:
            self._scale(factor, self._buffer)

    def _scale(self, factor: Tensor, kept: GradientBuffer | None) -> None:
        if kept is not None:
            kept.scale(factor)
        for part in self.chunk.parts:
            gradient = part.parameter.grad
            gradient = gradient.earlier if isinstance(gradient, DeferredGradient) else gradient
            if gradient is not None:
                scale_gradient(gradient, factor)

    def noted_tokens(self) -> Tensor | None:
        """The number of tokens that the chunk's gradient is the mean over, 0-dim. None if
        `note_tokens` has not set it.
        """
        notes = (getattr(part.parameter.grad, TOKENS, None) for part in self.chunk.parts)
        return next((note[0] for note in notes if note is not None), None)

    def note_tokens(self, total: Tensor) -> None:
        """Notes that the chunk's gradient is the mean over `total` tokens, 0-dim."""
        if self._saved is not None:
            self._saved.total = total
            return
        for part in self.chunk.parts:
            if part.parameter.grad is not None:
                note_tokens(part.parameter.grad, total, part.parameter.grad._version)

    def drop(self) -> None:
        """Drops all gradients that are not reduced yet."""
        self._buffer, self._kept, self.partial = GradientBuffer(*self._buffer.like), [], None
        self.pending = self.owed = False
        for part in self.chunk.parts:
            if isinstance(deferred := part.parameter.grad, DeferredGradient):
                deferred.leave(part.parameter, partial(self.flow.typed, part))
        self._forget()

    def drop_all(self) -> None:
        """Drops the chunk's gradient, too."""
        self.drop()
        self.unreached.forget()
        for part in self.chunk.parts:
            part.parameter.grad = None

    # -- a backward that raised

    def abandon(self) -> None:
        """Drops the gradients of a backward that did not end. Kept gradients go too, because both
        are in one sum; a savepoint keeps them apart.
        """
        if self.saves:
            self.roll_back()
        else:
            self.drop()

    def drop_what_lands(self) -> None:
        """What is still on its way belongs to a backward that raised, until `give_up`."""
        self._drops = True

    def give_up(self) -> None:
        """Drops the gradients of a backward that raised; without a savepoint also what they were
        added to.
        """
        self._drops = False
        if self.saves:
            self.roll_back()
        else:
            self.drop_all()

    # -- savepoints

    @property
    def undecided(self) -> bool:
        """Whether there are gradients that are neither committed nor rolled back."""
        saved = self._saved
        return saved is not None and (
            bool(saved.staged) or saved.factor is not None or self._kept is not saved.kept
        )

    @property
    def disturbed(self) -> bool:
        """Whether the caller has zeroed or replaced the chunk's gradient inside a `step_guard`."""
        guard = self._guard
        guard.disturbed = guard.disturbed or any(
            part.parameter.grad is not placed
            or (isinstance(placed, DeferredGradient) and placed.zeroed)
            for part, placed in guard.placed or ()
        )
        return guard.disturbed

    def guard(self, *, on: bool) -> None:
        """A `step_guard` begins, or is over. For between backwards."""
        self.saves = self._guard.always or on

    def end_backward(self, layer: DefersReductions) -> None:
        """A backward has ended without an error: for one that saves."""
        if layer.holds:
            self._place(layer)
        else:
            self.commit()

    def _place(self, layer: DefersReductions) -> None:
        """Until the commit, deferred gradients stand for the chunk's."""
        self._save()
        for part in self.chunk.parts if not self.disturbed else ():
            parameter = part.parameter
            if parameter.requires_grad and not isinstance(parameter.grad, DeferredGradient):
                if self._guard.nothing is None:
                    self._guard.nothing = no_values_for(parameter)
                parameter.grad = DeferredGradient.like(
                    parameter, weakref.ref(layer), self._guard.nothing
                )
        self._guard.placed = tuple(self._standing())

    def _save(self) -> _Savepoint:
        if self._saved is None:
            gradients = [part.parameter.grad for part in self.chunk.parts]
            self._saved = _Savepoint(self._buffer, self._kept, self.owed, gradients, self.partial)
            self._buffer = GradientBuffer(*self._buffer.like)
        return self._saved

    def _merge_earlier(self) -> None:
        """What was kept before the savepoint goes the same way as what came since."""
        saved = self._save()
        if not saved.merged and not saved.buffer.empty:
            saved.merged = True
            self._buffer.merge(saved.buffer, saved.factor)

    def _forget(self) -> None:
        self._saved = self._guard.placed = None
        self._guard.disturbed = False

    @torch.no_grad()
    def commit(self) -> None:
        """Adds what has landed since the savepoint to the chunk's gradient, and ends it."""
        saved = self._saved
        self._forget()
        if saved is None:
            return
        if not saved.merged:  # no backward reached this chunk, or there was nothing to merge
            self._buffer = saved.buffer if self._buffer.empty else self._buffer
        if saved.factor is not None:
            self._scale(saved.factor, None if saved.merged else saved.buffer)
        for each in saved.staged:
            self._accumulate(*each)
        for part in self.chunk.parts if not self.owed else ():
            # no backward has reached this chunk
            if isinstance(part.parameter.grad, DeferredGradient):
                part.parameter.grad = part.parameter.grad.earlier
        if saved.total is not None:
            self.note_tokens(saved.total)

    def roll_back(self) -> None:
        """Restores what was held at the savepoint, and ends it. What the caller has zeroed since
        stays so, unless a guard is open.
        """
        saved, guarded, disturbed = self._saved, self._guard.placed is not None, self.disturbed
        self._forget()
        self._guard.disturbed = disturbed
        if saved is None:
            return
        self.pending = False
        self._buffer, self._kept = saved.buffer, saved.kept
        self.owed, self.partial = saved.owed, saved.partial
        for part, gradient in zip(self.chunk.parts, saved.gradients, strict=True):
            found = part.parameter.grad
            zeroed = isinstance(found, DeferredGradient) and found.zeroed and not guarded
            if isinstance(gradient, DeferredGradient):
                gradient.count_as_zeroed(zeroed)
            if guarded or isinstance(found, DeferredGradient):
                stays = not zeroed or isinstance(gradient, DeferredGradient)
                part.parameter.grad = gradient if stays else None


def _earlier(parameter: nn.Parameter) -> Tensor | None:
    """The gradient that the next one is added to."""
    gradient = parameter.grad
    return gradient.earlier if isinstance(gradient, DeferredGradient) else gradient
