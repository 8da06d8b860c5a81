"""From autograd's gradients to a chunk's: hooks bring them, a chunk's reducer adds them up, and backs them up to the rank's slice."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from ..comm.log import Transfer, TransferLog
from ..comm.streams import Done, Lane, Mark, Pending
from ..policy import ShardingPolicy
from .autograd import accumulates_into, as_plain_tensors
from .chunk import Chunk, Part
from .gradient_buffer import GradientBuffer
from .gradient_types import PieceGradient, ShardGradient, WholeGradient, accumulate
from .kept_gradients import KeptGradients
from .parameters import ShardedParameter
from .policy_facts import gradient_dtype, shards_gradients

__all__: list[str] = []


class Backup(NamedTuple):
    """A reduction under way. It holds its buffers until compute has waited for it: only then may they be handed out again."""

    mark: Mark
    held: tuple[Tensor | None, ...]
    naming: NamingFailures

    def wait(self) -> None:
        try:
            self.mark.wait()
        except RuntimeError as failure:
            self.naming.explain(failure)
            raise


class GradientReducer(KeptGradients):
    """Adds up the gradients of a chunk's parameters until `back_up`, which reduces them into the chunk's own gradient.

    `keep` in place of `back_up` leaves the sum for a later backward to add to and to reduce, unless the chunk's gradient is
    zeroed meanwhile.
    """

    def __init__(self, chunk: Chunk, communicator: Communicator, policy: ShardingPolicy, naming: NamingFailures) -> None:
        self.communicator = communicator
        self.averaged_over = communicator.world_size  # ranks; fewer where some have run out of data
        super().__init__(chunk, gradient_dtype(policy, chunk.shard.dtype))
        self._mean = policy.gradient_reduction == "mean"
        self._narrows = self._dtype.itemsize > chunk.shard.dtype.itemsize
        # fp16 overflows at 65504: there a part of the mean's division comes before the sum
        self._divide_first = 1 << (communicator.world_size.bit_length() - 1) // 2 if self._mean and self._dtype == torch.float16 else 1
        self._naming = naming

    def add(self, index: int, gradient: Tensor) -> None:
        """Takes in the gradient of slot number `index`."""
        self.pending = True
        self._buffer.add(index, gradient)

    def back_up(self, lane: Lane, communicator: Communicator) -> Backup:
        """[backup 1] Begins to reduce what has come in (zeros, if nothing has) into this rank's slice, and gives its buffer away."""
        pieces = self._buffer.pieces() if communicator.takes_pieces and self._divide_first == 1 else None
        full = self._buffer.complete() if pieces is None else None
        self._buffer, self._kept = GradientBuffer(self._chunk.layout, self._chunk.shard, self._dtype), []
        self.pending = self.owed = False
        shard = self._chunk.shard
        summed = full if full is not None and communicator.world_size == 1 else torch.empty_like(shard.data, dtype=self._dtype)
        landed = summed if shard.dtype == self._dtype else torch.empty_like(summed, dtype=shard.dtype)
        with lane.issue():
            pending: Pending = Done()
            if pieces is not None:
                pending = communicator.reduce_pieces(summed, pieces)
            elif full is not None and full is not summed:
                full = full.div_(self._divide_first) if self._divide_first > 1 else full
                pending = communicator.reduce_scatter(summed, full, self._chunk.layout.bounds)
            mark = lane.complete(pending, lambda: self._land(summed, landed))
        return Backup(mark, (full, summed, landed), self._naming)

    def _land(self, summed: Tensor, landed: Tensor) -> None:
        """[backup 3] `summed` `[S]`, over ranks, becomes or joins the chunk's gradient, by way of `landed`, which has its dtype."""
        if torch.is_grad_enabled():  # not in a backward, where this is called most
            with torch.no_grad():
                return self._land(summed, landed)
        divisor = self.averaged_over / self._divide_first if self._mean else 1
        if self._narrows and divisor != 1:
            summed.div_(divisor)
        if landed is not summed:
            landed.copy_(summed)
        if not self._narrows and divisor != 1:
            landed.div_(divisor)
        self._take(landed, summed)

    def _take(self, landed: Tensor, summed: Tensor) -> None:
        for part in self._chunk.parts:
            if part.parameter.requires_grad:
                gradient = self._typed(part.of(landed), part)
                accumulate(part.parameter, gradient, part.of(summed) if self._narrows else None)

    def _typed(self, gradient: Tensor, part: Part) -> Tensor:
        kind = WholeGradient if part.whole else PieceGradient if self._chunk.divided else ShardGradient
        return gradient if self.communicator.world_size == 1 else kind.of(gradient, self.communicator)

    # -- the end of a backward, or of what is left of it

    undecided = False  # whether gradients came that nobody has decided on: see `transactions`

    def end_backward(self, layer: LayerGradients) -> None:
        """The backward is over: what it brought counts."""

    def abandon(self) -> None:
        """A backward did not end: what it brought is dropped. With it goes what was kept, because the two are one sum."""
        self.drop()

    def give_up(self) -> None:
        """A backward broke: what it brought is dropped, and the chunk's gradient too."""
        self.drop_all()

    def drop_all(self) -> None:
        self.drop()
        for part in self._chunk.parts:
            part.parameter.grad = None


class LayerGradients:
    """A layer's reducers, one a chunk, and the hooks that bring them gradients.

    Autograd's hooks and deferred gradients refer to this object weakly, and this one to the model's backward: a model that
    is deleted is freed at once, and not when the cycle collector runs.
    """

    def __init__(
        self, communicator: Communicator, policy: ShardingPolicy, subject: Subject, reducer: type[GradientReducer] = GradientReducer
    ) -> None:
        self.reducers: dict[Chunk, GradientReducer] = {}
        self.reducer = reducer  # what a chunk gets
        self.backward: Callable[[], Any] = lambda: None  # a weak reference to the `Backward` of its model
        self.log = TransferLog()  # of the model
        self.averaged_over = communicator.world_size  # ranks
        self.deferrals = 0  # `no_sync` contexts that it is in
        self.holds = 0  # `step_guard` contexts that it is in
        self._stay_whole = not shards_gradients(policy)
        self._entry = Transfer("reducing", subject, 2 * communicator.channel)
        self._communicator, self._policy = communicator, policy
        self._naming = NamingFailures(communicator, "reducing the gradients of", subject)
        self._hooked: dict[int, ShardedParameter] = {}  # by the id of the parameter

    def add_chunk(self, chunk: Chunk) -> None:
        self.reducers[chunk] = self.reducer(chunk, self._communicator, self._policy, self._naming)

    def replace_chunks(self, chunks: Iterable[Chunk], parameters: Iterable[ShardedParameter]) -> None:
        """The same parameters in other chunks."""
        before, self.reducers = self.reducers, {}
        for chunk in chunks:
            self.add_chunk(chunk)
            self.reducers[chunk] = before.get(chunk, self.reducers[chunk])
        for sharded in parameters:
            self.hook(sharded)

    def hook(self, sharded: ShardedParameter) -> None:
        """From now on, what autograd accumulates into the parameter goes to its chunk's reducer."""
        parameter, key, layer = sharded.sites.parameter, id(sharded.sites.parameter), weakref.ref(self)
        known = key in self._hooked
        if not parameter.requires_grad:
            return
        self._hooked[key] = sharded
        if known:
            return

        def take(leaf: Tensor) -> None:  # [B4] holds neither the parameter nor us: the cycle collector does not see into hooks
            with as_plain_tensors():  # it may be released by now
                gradient, leaf.grad = leaf.grad, None
            if gradient is not None and (gradients := layer()) is not None:
                gradients.add(key, gradient)

        with as_plain_tensors():
            parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    def add(self, key: int, gradient: Tensor) -> None:
        sharded = self._hooked[key]
        reducer = self.reducers[sharded.chunk]
        if not reducer.pending and (backward := self.backward()) is not None:
            backward.begin()  # perhaps it came by a way outside the layer's calls: somebody has to end this backward
        reducer.add(sharded.index, gradient)

    @property
    def deferred(self) -> bool:
        """Whether reductions wait: under `no_sync`, at stage 1. On one rank there are none to save, and memory to lose."""
        return (self.deferrals > 0 or self._stay_whole) and self._communicator.world_size > 1

    def pending(self) -> bool:
        """Whether gradients have come in, in this backward, that no backup has taken."""
        return any(reducer.pending for reducer in self.reducers.values())

    def owed(self) -> bool:
        """Whether an earlier backward, under `no_sync`, has left its reduction to a later one."""
        return any(reducer.owed for reducer in self.reducers.values())

    def expected(self) -> bool:
        """Whether the backward that runs now writes gradients of this layer's parameters."""
        return accumulates_into(sharded.sites.parameter for sharded in self._hooked.values())

    def back_up(self, lane: Lane, communicator: Communicator) -> list[Backup]:
        """Begins to reduce the gradients of all trainable chunks."""
        self.log.entries.append(self._entry)
        try:
            return [reducer.back_up(lane, communicator) for chunk, reducer in self.reducers.items() if chunk.shard.requires_grad]
        except RuntimeError as failure:
            self._naming.explain(failure)
            raise

    def keep(self) -> None:
        for chunk, reducer in self.reducers.items():
            if chunk.shard.requires_grad:
                reducer.keep(self)

    def reduce_deferred(self) -> bool:
        """Somebody needs a gradient that has stayed whole (stage 1): reduces those of the model. False under `no_sync`."""
        backward = self.backward()
        if not self._stay_whole or self.deferrals or backward is None:
            return False
        backward.reduce_deferred()
        return True

    def end_backward(self) -> None:
        for reducer in self.reducers.values():
            reducer.end_backward(self)
