"""Reduces gradients: hooks take them from autograd, a reducer for each chunk adds them up, and a
backup sums them over ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from ..comm.log import Entry, TransferLog
from ..comm.streams import Lane, Lanes, Mark
from ..policy import ShardingPolicy, gradient_dtype, landed_dtype, shards_gradients
from .autograd import accumulates_into, as_plain_tensors
from .chunk import Chunk, Part
from .compressed import sending_for
from .gradient_buffer import GradientBuffer, Sending
from .gradient_types import PieceGradient, ShardGradient, WholeGradient, accumulate
from .ignored import IgnoredGradient
from .kept_gradients import KeptGradients
from .parameters import ShardedParameter

__all__: list[str] = []


class Backup(NamedTuple):
    """A reduction under way. It holds its buffers until the compute stream has waited for it: then
    they may be freed.
    """

    mark: Mark
    held: tuple[object, ...]
    # what it adds to: after a backward that raised, users may zero gradients before anybody has
    # waited
    into: Sequence[Tensor | None]
    naming: NamingFailures

    def wait(self) -> Sequence[Backup]:
        """Waits, and returns what goes on, whose mark holds what it needs. That is waited for at
        the end of the backward.
        """
        try:
            later = self.mark.wait()
        except RuntimeError as failure:
            self.naming.explain(failure)
            raise
        return () if later is None else (Backup(later, (), self.into, self.naming),)


class GradientReducer(KeptGradients):
    """Adds up the gradients of a chunk's parameters. `prepare` and `back_up` reduce the sum over
    ranks into the chunk's own gradient.

    `keep`, instead of them, leaves the sum for a later reduction. If the chunk's gradient is zeroed
    before, the sum is dropped.
    """

    def __init__(
        self,
        chunk: Chunk,
        communicator: Communicator,
        policy: ShardingPolicy,
        naming: NamingFailures,
    ) -> None:
        self.communicator = communicator
        # the number of ranks for the mean: fewer if some have no data left
        self.averaged_over = communicator.world_size
        self._sending, self._summed_as = sending_for(policy, chunk, communicator, naming.subject)
        self._mean = policy.gradient_reduction == "mean"
        self._lands_as = landed_dtype(policy, chunk.shard.dtype)
        self._narrows = self._summed_as.itemsize > self._lands_as.itemsize
        super().__init__(
            chunk,
            gradient_dtype(policy, chunk.shard.dtype),
            self._summed_as if self._narrows else self._lands_as,
        )
        # fp16 overflows at 65504, so a part of the division for the mean is done before the sum
        self._divide_first = (
            1 << (communicator.world_size.bit_length() - 1) // 2
            if self._mean and self._summed_as == torch.float16
            else 1
        )
        self._naming = naming

    def add(self, index: int, gradient: Tensor) -> None:
        """Adds a gradient of slot number `index`."""
        self.pending = True
        self._buffer.add(index, gradient)

    def prepare(self, communicator: Communicator) -> Sending:
        """[backup 1] Takes the gradients out, zeros for slots without one, and allocates all that
        their reduction needs.
        """
        pieces = (
            self._buffer.pieces() if communicator.takes_pieces and self._divide_first == 1 else None
        )
        full = self._buffer.complete() if pieces is None else None
        kept_wider = full is not None and full.dtype != self._dtype
        if full is not None and kept_wider:
            full = full.div_(self._divide_first).to(self._dtype)
        summed = (
            full
            if full is not None and self._chunk.layout.world_size == 1
            else torch.empty(
                self._chunk.shard.shape, dtype=self._summed_as, device=self._chunk.device
            )
        )
        landed = (
            summed
            if self._lands_as == self._summed_as
            else torch.empty_like(summed, dtype=self._lands_as)
        )
        self._buffer, self._kept = (
            GradientBuffer(self._chunk.layout, self._dtype, self._chunk.device),
            [],
        )
        self.pending = self.owed = False
        sending = self._sending(pieces, full, summed, landed)
        sending.divided = kept_wider
        return sending

    def back_up(self, sending: Sending, lane: Lane, communicator: Communicator) -> Backup:
        """Starts to reduce the gradients into this rank's slice. The `Backup` owns the buffers."""
        summed, landed = sending.summed, sending.landed
        with lane.issue():
            if self._divide_first > 1 and sending.full is not None and not sending.divided:
                sending.full.div_(self._divide_first)
            pending = sending.start(communicator, self._chunk.layout.bounds)
            mark = lane.complete(pending, lambda: self._land(summed, landed))
        into = [part.parameter.grad for part in self._chunk.parts]
        return Backup(
            self._chunk.way_home(mark), (sending.travelling, summed, landed), into, self._naming
        )

    def _land(self, summed: Tensor, landed: Tensor) -> None:
        """[backup 3] Adds `summed` `[S]`, the sum over ranks, to the chunk's gradient. `landed`
        takes the mean in that gradient's dtype.
        """
        # in a backward it is off already, and entering no_grad costs time
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._land(summed, landed)
        divisor = self.averaged_over / self._divide_first if self._mean else 1
        if self._narrows and divisor != 1:
            summed.div_(divisor)
        if landed is not summed:
            landed.copy_(summed)
        if not self._narrows and divisor != 1:
            landed.div_(divisor)
        self._chunk.hand_over(self._take, landed, summed)

    def _take(self, landed: Tensor, summed: Tensor) -> None:
        for part in self._chunk.parts:
            if part.parameter.requires_grad and not self.drops:
                gradient = self._typed(part.of(landed), part)
                accumulate(part.parameter, gradient, part.of(summed) if self._narrows else None)

    def _typed(self, gradient: Tensor, part: Part) -> Tensor:
        kind = (
            WholeGradient if part.whole else PieceGradient if self._chunk.divided else ShardGradient
        )
        return (
            gradient if self._chunk.layout.world_size == 1 else kind.of(gradient, self.communicator)
        )

    # -- the end of a backward, also of one that raised

    # whether what lands is dropped at once, so that no hook of the caller's sees it: its backward
    # has raised
    drops = False
    # whether there are gradients that a transaction has neither committed nor rolled back
    undecided = False

    def end_backward(self, layer: LayerGradients) -> None:
        """Called when a backward has ended without an error. `TransactionalReducer` commits
        here.
        """

    def abandon(self) -> None:
        """Drops the gradients of a backward that did not end. Kept gradients go too, because both
        are in one sum.
        """
        self.drop()

    def give_up(self) -> None:
        """Drops the gradients of a backward that raised, and the chunk's gradient."""
        self.drops = False
        self.drop_all()

    def drop_all(self) -> None:
        self.drop()
        for part in self._chunk.parts:
            part.parameter.grad = None


class LayerGradients:
    """A layer's reducers, one for each chunk, and the hooks that give them autograd's gradients.

    Hooks and deferred gradients refer to this object weakly, and this object refers weakly to the
    model's `Backward`. So there are no cycles, and a deleted model is freed at once.
    """

    # what a backward does with them, unless they are deferred: a text that ranks compare
    fate = "gradients reduced"

    def __init__(
        self,
        communicator: Communicator,
        policy: ShardingPolicy,
        subject: Subject,
        reducer: type[GradientReducer] = GradientReducer,
    ) -> None:
        self.reducers: dict[Chunk, GradientReducer] = {}
        self.reducer = reducer  # the class of new reducers
        # of the layer's parameters that are left alone
        self.ignored: tuple[IgnoredGradient, ...] = ()
        # a weak reference to the model's `Backward`
        self.backward: Callable[[], Any] = lambda: None
        self.log = TransferLog()  # the model's
        self.averaged_over = communicator.world_size  # the number of ranks for the mean
        self.deferrals = 0  # the number of `no_sync` contexts that the layer is in
        self.holds = 0  # the number of `step_guard` contexts that the layer is in
        self._stay_whole = not shards_gradients(policy)
        self._entry = Entry("reducing", subject, 2 * communicator.channel)
        self._communicator, self._policy = communicator, policy
        self._naming = NamingFailures(communicator, "reducing the gradients of", subject)
        self._hooked: dict[int, ShardedParameter] = {}  # by the id of the parameter

    def add_chunk(self, chunk: Chunk) -> None:
        chunk.shard.grad_dtype = landed_dtype(self._policy, chunk.shard.dtype)
        self.reducers[chunk] = self.reducer(chunk, self._communicator, self._policy, self._naming)

    def replace_chunks(
        self, chunks: Iterable[Chunk], parameters: Iterable[ShardedParameter]
    ) -> None:
        """Takes other chunks for the same parameters."""
        before, self.reducers = self.reducers, {}
        for chunk in chunks:
            self.add_chunk(chunk)
            self.reducers[chunk] = before.get(chunk, self.reducers[chunk])
        for sharded in parameters:
            self.hook(sharded)

    def hook(self, sharded: ShardedParameter) -> None:
        """From now on, the gradients that autograd accumulates into the parameter go to its chunk's
        reducer.
        """
        parameter, key, layer = (
            sharded.sites.parameter,
            id(sharded.sites.parameter),
            weakref.ref(self),
        )
        known = key in self._hooked
        if not sharded.chunk.trains:
            return
        self._hooked[key] = sharded
        if known:
            return

        # [B4] holds no strong reference, because the cycle collector can't see into hooks
        def take(leaf: Tensor) -> None:
            with as_plain_tensors():  # the parameter may be released already
                gradient, leaf.grad = leaf.grad, None
            if gradient is not None and (gradients := layer()) is not None:
                gradients.add(key, gradient)

        with as_plain_tensors():
            if self._policy.grad_dtype is not None:
                parameter.grad_dtype = gradient_dtype(self._policy, sharded.chunk.shard.dtype)
            parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def add(self, key: int, gradient: Tensor) -> None:
        sharded = self._hooked[key]
        reducer = self.reducers[sharded.chunk]
        if not reducer.pending and (backward := self.backward()) is not None:
            # the gradient may come from outside the layer's calls, so no other hook may have begun
            # the backward
            backward.begin()
        reducer.add(sharded.index, gradient)

    @property
    def deferred(self) -> bool:
        """Whether reductions are left for later: under `no_sync` and at stage 1. On one rank that
        would only cost memory.
        """
        return (self.deferrals > 0 or self._stay_whole) and self._communicator.world_size > 1

    def pending(self) -> bool:
        """Whether this backward has added gradients that are not backed up yet."""
        return any(reducer.pending for reducer in self.reducers.values())

    def owed(self) -> bool:
        """Whether an earlier backward has kept gradients that are not reduced yet."""
        return any(reducer.owed for reducer in self.reducers.values())

    def due(self) -> bool:
        """Whether such gradients are to be reduced by the present backward."""
        return self.may_reduce and not self._stay_whole and self.owed()

    def defer(self, contexts: int, *, replicas_only: bool) -> None:
        """Enters (1) or leaves (-1) a `no_sync`. Where there are no replicas, `replicas_only`
        restricts nothing.
        """
        if not replicas_only:
            self.deferrals += contexts

    @property
    def may_reduce(self) -> bool:
        """Whether gradients may be reduced over all ranks now. Under `no_sync` they may not."""
        return not self.deferrals

    def expected(self) -> bool:
        """Whether the present backward computes gradients of this layer's parameters."""
        return accumulates_into(sharded.sites.parameter for sharded in self._hooked.values())

    def prepare(self, communicator: Communicator) -> list[tuple[GradientReducer, Sending]]:
        """Allocates what the reductions of all trainable chunks need, before ranks rely on them:
        memory may run out on one rank alone.
        """
        return [
            (reducer, reducer.prepare(communicator))
            for chunk, reducer in self.reducers.items()
            if chunk.shard.requires_grad
        ]

    def back_up(
        self,
        prepared: list[tuple[GradientReducer, Sending]],
        lanes: Lanes,
        communicator: Communicator,
    ) -> list[Backup]:
        """Starts to reduce the gradients of all trainable chunks."""
        self.log.entries.append(self._entry)
        try:
            return [
                reducer.back_up(sending, lanes.backup, communicator)
                for reducer, sending in prepared
            ]
        except RuntimeError as failure:
            self._naming.explain(failure)
            raise

    def keep(self) -> None:
        for chunk, reducer in self.reducers.items():
            if chunk.shard.requires_grad:
                reducer.keep(self)

    def reduce_deferred(self) -> bool:
        """Reduces all deferred gradients of the model (stage 1). Returns False if that is not
        allowed yet, under `no_sync`.
        """
        backward = self.backward()
        if not self._stay_whole or not self.may_reduce or backward is None:
            return False
        backward.reduce_deferred()
        return True

    def begin_backward(self) -> None:
        """Called for layers with parameters that are left alone."""
        for each in (
            self.ignored
            if self._policy.transactional or self.averaged_over != self._communicator.world_size
            else ()
        ):
            each.stage()

    def end_backward(self) -> None:
        for reducer in self.reducers.values():
            reducer.end_backward(self)
        for each in self.ignored:
            weighs = self._policy.gradient_reduction == "mean"
            each.end_backward(self._communicator.world_size / self.averaged_over if weighs else 1)
