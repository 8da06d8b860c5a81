"""Updates parameters inside DDP's backward: those of each bucket, after DDP has reduced it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..comm.ddp import GradBucket, mean_of_ranks
from .division import Spread
from .groups import function_name
from .local import Groups, copy_options, options_of
from .shards import Shards

__all__: list[str] = []

Reduction = Callable[[Any, GradBucket], torch.futures.Future[Any]]


class DDPOverlap:
    """A communication hook for DDP. It reduces a bucket, and meanwhile updates the parameters of
    the bucket before it.

    All ranks do both in the order of the buckets, so they make the same collectives in the same
    order. DDP may change its buckets at any time, because every parameter is divided by itself.
    """

    def __init__(self, shards: Shards, optimizer: Optimizer) -> None:
        self.hooked = False
        self._shards = shards
        # a weak reference, because the optimizer holds this object
        self._outer = weakref.ref(optimizer)
        # since the last update; on a rank without data, DDP runs this hook without a forward
        self._forward_ran = False
        self._reducing: tuple[GradBucket, torch.futures.Future[Any]] | None = None
        self._spreads: dict[Tensor, Spread] = {}

    def hook(self, ddp: Any, reduction: Reduction | None) -> Reduction:
        named = "mean" if reduction is None else function_name(reduction)
        with self._shards.ranks.agreeing() as lines:
            lines += [f"hook(), reduction={named}", *self._checked(ddp, reduction)]
        self.hooked = True
        self._spreads = {spread.parameter: spread for spread in self._shards.spreads}
        ddp.register_forward_pre_hook(self._note_forward)
        reduce = reduction or mean_of_ranks
        group = ddp.process_group
        # a lambda has no annotations, which DDP would compare with its own
        return lambda state, bucket: self._reduce_and_update(
            reduce, group if reduction is None else state, bucket
        )

    def check_hooked(self) -> None:
        """Raises if DDP does not have the hook, so that its backwards make no updates."""
        if not self.hooked:
            raise RuntimeError(
                "overlap_with_ddp=True updates parameters during DDP's backward, but DDP does "
                "not have the hook: call ddp.register_comm_hook(None, optimizer.hook(ddp)) once, "
                "before training"
            )

    def _checked(self, ddp: Any, reduction: object) -> list[str]:
        """Returns which parameters of `ddp` the optimizer's are, or raises."""
        if reduction is not None and not callable(reduction):
            raise TypeError(
                f"reduction must be a communication hook, found {type(reduction).__name__}"
            )
        if not hasattr(ddp, "find_unused_parameters"):
            raise TypeError(
                f"hook() takes the DistributedDataParallel model, found a {type(ddp).__name__}"
            )
        known = {parameter: name for name, parameter in ddp.named_parameters()}
        if foreign := next(
            (spread.name for spread in self._shards.spreads if spread.parameter not in known), None
        ):
            raise ValueError(
                f"{foreign} of the optimizer is no parameter of the DistributedDataParallel "
                "model: it would never be updated"
            )
        if ddp.find_unused_parameters:
            raise ValueError(
                "overlap_with_ddp=True can't be used with find_unused_parameters=True: which "
                "parameters no rank has used, so that they must be left as they are, is known "
                "only after the backward"
            )
        return [f"{spread.name} is {known[spread.parameter]}" for spread in self._shards.spreads]

    def _note_forward(self, ddp: Any, *_: Any) -> None:
        """Of a forward whose backward will reduce."""
        self._forward_ran |= torch.is_grad_enabled() and ddp.require_backward_grad_sync

    @torch.no_grad()
    def _reduce_and_update(
        self, reduce: Reduction, state: Any, bucket: GradBucket
    ) -> torch.futures.Future[Any]:
        if bucket.index() == 0:
            self._reducing = None  # an earlier backward may have raised
            self._shards.gathers.drop()
            self._begin()
        future = reduce(state, bucket)
        self._update()
        self._reducing = (bucket, future)
        if bucket.is_last():
            self._update()
            self._shards.gathers.finish()
            self._forward_ran = False
            self._shards.give_options(self._groups)
        return future

    @property
    def _groups(self) -> Groups:
        if (optimizer := self._outer()) is None:
            raise RuntimeError(
                "the ZeroRedundancyOptimizer that overlaps with this DDP model is gone: keep it "
                "as long as the model trains"
            )
        return optimizer.param_groups

    def _begin(self) -> None:
        """A rank without data, where schedules stand still, gets the options from one with data."""
        groups, ranks, joined = self._groups, self._shards.ranks, not self._forward_ran
        lines = self._shards.changes_in(groups)
        error = None if joined else self._shards.mistake()
        leader = ranks.roll_call([] if joined else lines, joined=joined, error=error)
        if leader is not None:
            told = {"options": [options_of(group) for group in groups]}
            copy_options(
                ranks.tell(told, leader, "an update of ZeroRedundancyOptimizer")["options"], groups
            )
        copy_options(groups, self._shards.optimizer.param_groups)

    def _update(self) -> None:
        """Waits for the bucket that is being reduced, and updates its parameters."""
        if self._reducing is None:
            return
        (bucket, future), self._reducing = self._reducing, None
        reduced = future.wait()
        reduced = reduced[0] if isinstance(reduced, list) else reduced
        if reduced.data_ptr() != bucket.buffer().data_ptr():
            bucket.buffer().copy_(reduced.view(-1))
        spreads = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if (spread := self._spreads.get(parameter)) is not None:
                spread.take(gradient)
                spreads.append(spread)
        self._shards.update(spreads, None, {})
