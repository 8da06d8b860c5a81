"""A layer's gradients: the hooks that take them from autograd, and an account for each chunk."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from ..comm.log import Entry, TransferLog
from ..comm.streams import Lanes
from .account import Account
from .autograd import accumulates_into, as_plain_tensors
from .chunk import Chunk
from .flow import Among, Travelling
from .ignored import IgnoredGradient
from .parameters import ShardedParameter
from .ticket import Ticket

__all__: list[str] = []

Deferral = tuple[int, int, bool]  # `no_sync`s, those of replicas alone, whether gradients are kept
Prepared = list[tuple[Account, Travelling]]


class LayerGradients:
    """A layer's accounts, one for each chunk, and the hooks that give them autograd's gradients.

    Hooks and deferred gradients refer to this object weakly, and this object refers weakly to the
    model's `Backward`. So there are no cycles, and a deleted model is freed at once.
    """

    def __init__(
        self,
        communicator: Communicator,
        subject: Subject,
        new_account: Callable[[Chunk, Among], Account],
        dtype_for: Callable[[torch.dtype], torch.dtype | None],
        over: Communicator,
        *,
        waits: bool,
    ) -> None:
        """`dtype_for`: of a chunk's dtype, that in which autograd hands over gradients. None: in
        the parameter's own. `over`: the ranks that sum gradients, if not all have a share in them.
        `waits`: reductions wait until somebody asks for a gradient (stage 1).
        """
        self.accounts: dict[Chunk, Account] = {}
        # of the layer's parameters that are left alone
        self.ignored: tuple[IgnoredGradient, ...] = ()
        # a weak reference to the model's `Backward`
        self.backward: Callable[[], Any] = lambda: None
        self.log: TransferLog  # the model's, by `write_into`
        # the number of `no_sync` contexts that the layer is in, and of those with `replicas_only`
        self.deferrals = self._replica_deferrals = 0
        self.holds = 0  # the number of `step_guard` contexts that the layer is in
        self.among = Among(communicator, communicator.world_size, over)
        # whether reductions are left for later: under `no_sync` and at stage 1. On one rank that
        # would only cost memory.
        self.deferred = waits and over.world_size > 1
        self._waits, self._new_account, self._dtype_for = waits, new_account, dtype_for
        self._entry = Entry("reducing", subject, 2 * communicator.channel)
        self._naming = NamingFailures(communicator, "reducing the gradients of", subject)
        self._hooked: dict[int, ShardedParameter] = {}  # by the id of the parameter

    def tell(self, backward: Any) -> None:
        """`backward`: the model's, which is told of the first gradient."""
        self.backward = weakref.ref(backward)

    def write_into(self, log: TransferLog) -> None:
        """`log`: the model's."""
        self.log = log

    def leave_alone(self, ignored: Iterable[IgnoredGradient]) -> None:
        self.ignored = tuple(ignored)

    def leave_alone_instead(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """A parameter that is left alone has got its values, in another object."""
        for each in self.ignored:
            each.follow(old, new)

    def add_chunk(self, chunk: Chunk) -> None:
        self.accounts[chunk] = self._new_account(chunk, self.among)

    def replace_chunks(
        self, chunks: Iterable[Chunk], parameters: Iterable[ShardedParameter]
    ) -> None:
        """Takes other chunks for the same parameters."""
        before, self.accounts = self.accounts, {}
        for chunk in chunks:
            self.add_chunk(chunk)
            self.accounts[chunk] = before.get(chunk, self.accounts[chunk])
        for sharded in parameters:
            self.hook(sharded)

    def hook(self, sharded: ShardedParameter) -> None:
        """From now on, the gradients that autograd accumulates into the parameter go to its chunk's
        account.
        """
        parameter, key = sharded.sites.parameter, id(sharded.sites.parameter)
        layer = weakref.ref(self)
        known = key in self._hooked
        if not (known or sharded.chunk.trains):
            return
        self._hooked[key] = sharded  # also of one that trained: else its old chunk would stay
        if known:
            return

        # [B4] holds no strong reference, because the cycle collector can't see into hooks
        def take(leaf: Tensor) -> None:
            with as_plain_tensors():  # the parameter may be released already
                gradient, leaf.grad = leaf.grad, None
            if gradient is None or (gradients := layer()) is None:
                return
            sharded = gradients._hooked[key]
            account = gradients.accounts[sharded.chunk]
            if not account.pending and (backward := gradients.backward()) is not None:
                # the gradient may come from outside the layer's calls, so no other hook may have
                # begun the backward
                backward.begin()
            account.add(sharded.index, gradient)

        with as_plain_tensors():
            if (dtype := self._dtype_for(sharded.chunk.compute_dtype)) is not None:
                parameter.grad_dtype = dtype
            parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]

    # -- how far they go

    @property
    def fate(self) -> str:
        """What a backward does with the gradients. All ranks have to do the same, so they compare
        this text.
        """
        if not any(chunk.shard.requires_grad or a.owed for chunk, a in self.accounts.items()):
            return "frozen"
        if self.deferred:
            return "gradients kept (as under no_sync)"
        if self._replica_deferrals:
            return "gradients reduced in each replica (as under no_sync(replicas_only=True))"
        return "gradients reduced"

    @property
    def may_reduce(self) -> bool:
        """Whether gradients may be reduced over all ranks now. Under `no_sync` they may not."""
        return not self.deferrals and not self._replica_deferrals

    def defer(self, contexts: int, *, replicas_only: bool) -> None:
        """Enters (1) or leaves (-1) a `no_sync`. Where there are no replicas, `replicas_only`
        restricts nothing.
        """
        if not replicas_only:
            self.deferrals += contexts
            later = self.deferrals > 0 or self._waits
            self.deferred = later and self.among.sums.world_size > 1
        elif self.among.sums.shards < self.among.sums.world_size:
            self._replica_deferrals += contexts

    @property
    def deferral(self) -> Deferral:
        return self.deferrals, self._replica_deferrals, self.deferred

    def defer_as(self, deferral: Deferral) -> Deferral:
        """Gradients go as far as when `deferral` was read. Returns the present one."""
        now = self.deferral
        self.deferrals, self._replica_deferrals, self.deferred = deferral
        return now

    def pending(self) -> bool:
        """Whether this backward has added gradients that are not backed up yet."""
        return any(account.pending for account in self.accounts.values())

    def owed(self) -> bool:
        """Whether an earlier backward has kept gradients that are not reduced yet."""
        return any(account.owed for account in self.accounts.values())

    def due(self) -> bool:
        """Whether such gradients are to be reduced by the present backward."""
        return self.may_reduce and not self._waits and self.owed()

    def expected(self) -> bool:
        """Whether the present backward computes gradients of this layer's parameters."""
        return accumulates_into(sharded.sites.parameter for sharded in self._hooked.values())

    # -- their way

    def prepare(self, communicator: Communicator) -> Prepared:
        """Allocates what the reductions of all trainable chunks need, before ranks rely on them:
        memory may run out on one rank alone. A chunk may have been frozen since its gradients were
        kept.
        """
        return [
            (
                account,
                account.take_room(
                    communicator if chunk.at is chunk.whole else chunk.at.communicator
                ),
            )
            for chunk, account in self.accounts.items()
            if chunk.shard.requires_grad or account.owed
        ]

    def back_up(self, prepared: Prepared, lanes: Lanes) -> list[Ticket]:
        """Starts to reduce the gradients of all trainable chunks. Where there are replicas and
        gradients may not be reduced over these yet, each replica's sums are kept.
        """
        ends_early = self._replica_deferrals > 0
        if lanes.replicas is not None:
            with self._naming:
                lanes.replicas.begin_deferred()
        self.log.entries.append(self._entry)
        tickets: list[Ticket] = []
        for account, gradient in prepared:
            tickets += [account.flow.start(gradient, lanes, self._naming, ends_early=ends_early)]
        if ends_early:
            for account, _ in prepared:
                account.keep(self)
            if (backward := self.backward()) is not None:
                backward.owe()
        return tickets

    def keep(self) -> None:
        for account in self.accounts.values():
            if account.chunk.shard.requires_grad:
                account.keep(self)

    def reduce_deferred(self) -> bool:
        """Reduces all deferred gradients of the model (stage 1). Returns False if that is not
        allowed yet, under `no_sync`.
        """
        backward = self.backward()
        if not self._waits or not self.may_reduce or backward is None:
            return False
        backward.reduce_deferred()
        return True

    def chunk_changed(self, label: str) -> None: ...

    # -- the begin and the end of a backward

    def begin_backward(self) -> None:
        """Called for layers with parameters that are left alone."""
        for each in self.ignored:
            each.begin_backward()

    def end_backward(self) -> None:
        for account in self.accounts.values():
            if account.saves:
                account.end_backward(self)
            if account.unreached.maybe:
                account.settle()
        for each in self.ignored:
            each.end_backward()

    def average_over(self, ranks: int) -> None:
        """The mean is taken over so many ranks: the others have no data left."""
        self.among.average_over(ranks)
        for each in self.ignored:
            each.average_over(ranks)

    def begin_guard(self) -> None:
        """From now on a `step_guard` commits or rolls back the gradients of backwards."""
        self.holds += 1
        for account in self.accounts.values():
            account.guard(on=True)
            account.watch(self)
        self.end_backward()
        for each in self.ignored:
            each.guard(on=True)

    def end_guard(self, *, keep: bool) -> None:
        """The `step_guard` is over: its gradients are committed, or rolled back if not `keep`."""
        for account in self.accounts.values() if not keep else ():
            account.roll_back()
        self.holds -= 1
        for each in self.ignored:
            if not keep:
                each.roll_back()
            each.guard(on=bool(self.holds))
        if not self.holds:
            self.end_backward()
            for account in self.accounts.values():
                account.guard(on=False)
