"""The flat gradient of a chunk: gathered from autograd one parameter at a time, backed up to the rank's slice of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm.communicator import Communicator, takes_parts
from ..comm.streams import Done, Lane, Mark, Pending
from ..policy import ShardingPolicy
from .accumulation import TOKENS, accumulate, scale_gradient
from .chunk import Chunk, Part
from .gradient_buffer import GradientBuffer
from .gradient_types import DeferredGradient, PieceGradient, ShardGradient, WholeGradient
from .policy_facts import gradient_dtype

__all__: list[str] = []


class Backup(NamedTuple):
    """A reduction on its way. Its buffers live until compute has waited for it: only then may they be handed out again."""

    mark: Mark
    held: tuple[Tensor | None, ...]
    naming: AbstractContextManager[None]

    def wait(self) -> None:
        with self.naming:
            self.mark.wait()


@dataclass(slots=True)
class _Before:
    """What a transaction found, to be put back if it fails. Nothing in it is written to until then."""

    sums: GradientBuffer
    kept: list[Part]
    owed: bool
    tokens: list[object]  # a part
    factor: Tensor | None = None  # what `scale` asked for
    total: Tensor | None = None  # what `note_tokens` did
    joined: bool = False  # `sums` have been added to the transaction's own sum


class GradientReducer:
    """Adds up the gradients of a chunk's parameters, from the first that comes to `back_up`. `keep` instead of `back_up`
    leaves the sum for a later backward to add to and to reduce, unless the optimizer's gradients are zeroed meanwhile.

    In a transaction, what is reduced is staged, and what earlier backwards have left stays as it is, until `commit` or `roll_back`.
    """

    def __init__(self, chunk: Chunk, communicator: Communicator, policy: ShardingPolicy, naming: AbstractContextManager[None]) -> None:
        self._chunk = chunk
        self.communicator = communicator
        self.averaged_over = communicator.world_size  # ranks; fewer where some have run out of data
        self._mean = policy.gradient_reduction == "mean"
        self._dtype = gradient_dtype(policy, chunk.shard.dtype)
        # fp16 overflows at 65504: there a part of the mean's division comes before the sum
        self._divide_first = 1 << (communicator.world_size.bit_length() - 1) // 2 if self._mean and self._dtype == torch.float16 else 1
        self._naming = naming  # of the layer, around transfers that may fail
        self._sums = self._new()
        self._kept: list[Part] = []  # those with a gradient when the sum was kept: it goes with theirs
        self.on_first: Callable[[], None] | None = None
        self.pending = False  # gradients have come in, in this backward, that no backup has taken
        self.owed = False  # an earlier backward has left its reduction to a later one
        self._transactional = policy.transactional
        self.holds = 0  # `step_guard` contexts that it is in: they decide on the transaction's end
        self._before: _Before | None = None  # of the transaction under way
        self._staged: list[tuple[Tensor, Tensor]] = []  # landed and summed, see `_land`

    def add(self, index: int, gradient: Tensor) -> None:
        """Takes in the gradient of slot number `index`."""
        if not self.pending:
            self.pending = True
            self._begin()
            if self.on_first is not None:
                self.on_first()
        self._sums.add(index, gradient)

    def back_up(self, lane: Lane, communicator: Communicator) -> Backup:
        """Begins to reduce what has come in (zeros, if nothing has) into this rank's slice; frees this object's buffer."""
        self._begin()
        self._join()
        parts = self._sums.parts() if takes_parts(communicator) and self._divide_first == 1 else None
        full = self._sums.complete() if parts is None else None
        self._clear()
        shard = self._chunk.shard
        summed = full if full is not None and communicator.world_size == 1 else torch.empty_like(shard.data, dtype=self._dtype)
        landed = summed if shard.dtype == self._dtype else torch.empty_like(summed, dtype=shard.dtype)
        with self._naming, lane.issue():
            pending: Pending = Done()
            if parts is not None and takes_parts(communicator):
                pending = communicator.reduce_parts(summed, parts)
            elif full is not None and full is not summed:
                full = full.div_(self._divide_first) if self._divide_first > 1 else full
                pending = communicator.reduce_scatter(summed, full, self._chunk.layout.bounds)
            mark = lane.complete(pending, lambda: self._land(summed, landed))
        return Backup(mark, (full, summed, landed), self._naming)

    def keep(self, look: Callable[[], bool]) -> None:
        """Leaves what has come in for a later backward. Until then the optimizer's gradients are such that it can't use them."""
        self._begin()
        self._join()
        if not self._sums.empty:
            self._sums.flat()
        self.pending, self.owed = False, True
        for part in self._chunk.parts:
            parameter = part.parameter
            if parameter.requires_grad:
                parameter.grad = DeferredGradient.like(parameter, look)
            if parameter.grad is not None:
                vars(parameter.grad).pop(TOKENS, None)
        self._kept = [part for part in self._chunk.parts if part.start < part.stop and part.parameter.grad is not None]

    @property
    def unseen(self) -> bool:
        """Whether what is kept is to join gradients of other ranks only, so that nobody here could zero them."""
        return self.owed and not self._kept

    def forget_zeroed(self) -> bool:
        """Between backwards: drops what was kept, if the gradients that it was to join have been zeroed since."""
        for part in self._kept:
            now = part.parameter.grad
            if now is None or (isinstance(now, DeferredGradient) and now.zeroed):
                self.drop()
                return True
        return False

    def scale(self, factor: Tensor, look: Callable[[], bool]) -> None:
        """Multiplies what the chunk's gradient holds, and what was kept to join it, by `factor`, 0-dim."""
        self._begin()
        if self._before is not None:
            self._before.factor = factor if self._before.factor is None else self._before.factor * factor
        else:
            self._scale(factor, self._sums.full)

    def _scale(self, factor: Tensor, kept: Tensor | None) -> None:
        if kept is not None:
            kept.mul_(factor)
        for part in self._chunk.parts:
            gradient = part.parameter.grad
            gradient = gradient.earlier if isinstance(gradient, DeferredGradient) else gradient
            if gradient is not None:
                scale_gradient(gradient, factor)

    def note_tokens(self, total: Tensor) -> None:
        """The chunk's gradient is now the mean over `total` tokens, 0-dim."""
        if self._before is not None:
            self._before.total = total
            return
        for part in self._chunk.parts:
            if part.parameter.grad is not None:
                setattr(part.parameter.grad, TOKENS, (total, part.parameter.grad._version))

    def drop(self) -> None:
        self._clear()
        for part in self._chunk.parts:
            if isinstance(awaited := part.parameter.grad, DeferredGradient):
                awaited.leave(part.parameter, partial(self._guarded, part=part))
        self._before = None
        self._staged = []

    def _clear(self) -> None:
        self._sums = self._new()
        self._kept = []
        self.pending = self.owed = False

    # -- transactions

    @property
    def transacts(self) -> bool:
        return self._transactional or self.holds > 0

    @property
    def undecided(self) -> bool:
        """Whether a transaction is under way."""
        return self._before is not None

    def _begin(self) -> None:
        if self.transacts and self._before is None:
            tokens = [getattr(part.parameter.grad, TOKENS, None) for part in self._chunk.parts]
            self._before = _Before(self._sums, self._kept, self.owed, tokens)
            self._sums = self._new()

    def _join(self) -> None:
        """Adds what the transaction found to its own sum so far."""
        if self._before is None or self._before.joined or self._before.sums.empty:
            return
        self._before.joined = True
        self._sums.join(self._before.sums, self._before.factor)

    def commit(self) -> None:
        """The transaction's gradients join the chunk's."""
        before, self._before = self._before, None
        if before is not None:
            self._commit(before)

    @torch.no_grad()
    def _commit(self, before: _Before) -> None:
        if not before.joined:  # no backward came to this chunk, or there was nothing to join
            self._sums = before.sums if self._sums.empty else self._sums
        if before.factor is not None:
            self._scale(before.factor, None if before.joined else before.sums.full)
        staged, self._staged = self._staged, []
        for landed, summed in staged:
            self._accumulate(landed, summed)
        if before.total is not None:
            self.note_tokens(before.total)

    def roll_back(self) -> None:
        """As if nothing had come in since the transaction began."""
        before, self._before, self._staged = self._before, None, []
        if before is None:
            return
        self._clear()
        self._sums, self._kept, self.owed = before.sums, before.kept, before.owed
        for part, tokens in zip(self._chunk.parts, before.tokens, strict=True):
            if isinstance(part.parameter.grad, DeferredGradient) and not self.owed:
                part.parameter.grad = part.parameter.grad.earlier
            if part.parameter.grad is not None and tokens is not None:
                setattr(part.parameter.grad, TOKENS, tokens)

    def _new(self) -> GradientBuffer:
        return GradientBuffer(self._chunk.layout, self._chunk.shard, self._dtype)

    def _land(self, summed: Tensor, landed: Tensor) -> None:
        """`summed` `[S]`, over ranks, becomes or joins the chunk's gradient, by way of `landed`, which has its dtype."""
        if torch.is_grad_enabled():  # not in a backward, where this is called most
            with torch.no_grad():
                return self._land(summed, landed)
        narrows = self._narrows
        divisor = self.averaged_over / self._divide_first if self._mean else 1
        if narrows and divisor != 1:
            summed.div_(divisor)
        if landed is not summed:
            landed.copy_(summed)
        if not narrows and divisor != 1:
            landed.div_(divisor)
        if self.transacts:
            self._staged.append((landed, summed))
        else:
            self._accumulate(landed, summed)

    @property
    def _narrows(self) -> bool:
        return self._dtype.itemsize > self._chunk.shard.dtype.itemsize

    def _accumulate(self, landed: Tensor, summed: Tensor) -> None:
        for part in self._chunk.parts:
            if part.parameter.requires_grad:
                gradient = self._guarded(_range(landed, part), part)
                accumulate(part.parameter, gradient, _range(summed, part) if self._narrows else None)

    def _guarded(self, gradient: Tensor, part: Part) -> Tensor:
        if self.communicator.world_size == 1:
            return gradient
        kind = WholeGradient if part.whole else PieceGradient if self._chunk.divided else ShardGradient
        return kind.of(gradient, self.communicator)


def _range(flat: Tensor, part: Part) -> Tensor:
    return flat[part.start : part.stop].view(part.parameter.shape)
