"""Updates parameters inside DDP's backward: those of each bucket, after DDP has reduced it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm.ddp import Bucket, mean_of_ranks
from .buckets import Entry
from .groups import Groups, agree_on, mistake_in, options_of
from .local_step import step_locally
from .shards import Shards
from .state import broadcast_values
from .step import roll_call, set_options

__all__: list[str] = []

Reduction = Callable[[Any, Bucket], torch.futures.Future[Any]]


class DDPOverlap:
    """A communication hook for DDP. It reduces a bucket, and meanwhile updates the parameters of the bucket before it.

    All ranks do both in the order of the buckets, so they make the same collectives in the same order. DDP may change its buckets at
    any time, because every parameter is divided by itself.
    """

    def __init__(self, shards: Shards, optimizer: Optimizer) -> None:
        self.hooked = False
        self._shards = shards
        self._outer = weakref.ref(optimizer)  # a weak reference, because the optimizer holds this object
        self._forward_ran = False  # since the last update; on a rank without data, DDP runs this hook without a forward
        self._reducing: tuple[Bucket, torch.futures.Future[Any]] | None = None
        self._entries: dict[Tensor, Entry] = {}

    def hook(self, ddp: Any, reduction: Reduction | None) -> Reduction:
        agree_on(self._shards, [f"hook(), reduction={'mean' if reduction is None else 'its own'}"], mistake_in(lambda: self._check(ddp)))
        self.hooked = True
        self._entries = {entry.parameter: entry for entry in self._shards.entries}
        ddp.register_forward_pre_hook(self._note_forward)
        reduce = reduction or mean_of_ranks
        group = ddp.process_group
        # a lambda has no annotations, which DDP would compare with its own
        return lambda state, bucket: self._reduce_and_update(reduce, group if reduction is None else state, bucket)

    def check_hooked(self) -> None:
        """Raises if DDP does not have the hook, so that its backwards make no updates."""
        if not self.hooked:
            raise RuntimeError(
                "overlap_with_ddp=True updates parameters during DDP's backward, but DDP does not have the hook: call "
                "ddp.register_comm_hook(None, optimizer.hook(ddp)) once, before training"
            )

    def _check(self, ddp: Any) -> None:
        if not hasattr(ddp, "find_unused_parameters"):
            raise TypeError(f"hook() takes the DistributedDataParallel model, found a {type(ddp).__name__}")
        known = {parameter: name for name, parameter in ddp.named_parameters()}
        for entry in self._shards.entries:
            if entry.parameter not in known:
                raise ValueError(
                    f"{entry.name} of the optimizer is no parameter of the DistributedDataParallel model: it would never be updated"
                )
        if ddp.find_unused_parameters:
            raise ValueError(
                "overlap_with_ddp=True can't be used with find_unused_parameters=True: which parameters no rank has used, so that "
                "they must be left as they are, is known only after the backward"
            )

    def _note_forward(self, module: nn.Module, inputs: Any) -> None:
        self._forward_ran = True

    @torch.no_grad()
    def _reduce_and_update(self, reduce: Reduction, state: Any, bucket: Bucket) -> torch.futures.Future[Any]:
        if bucket.index() == 0:
            self._reducing = None  # an earlier backward may have raised
            self._shards.drop_spreading()
            self._begin(joined=not self._forward_ran)
        future = reduce(state, bucket)
        self._update()
        self._reducing = (bucket, future)
        if bucket.is_last():
            self._update()
            self._shards.finish_spreading()
            self._forward_ran = False
            self._shards.copy_options_out(self._groups)
        return future

    @property
    def _groups(self) -> Groups:
        if (optimizer := self._outer()) is None:
            raise RuntimeError("the ZeroRedundancyOptimizer that overlaps with this DDP model is gone: keep it as long as the model trains")
        return optimizer.param_groups

    def _begin(self, *, joined: bool) -> None:
        """Begins an update. A rank without data, where schedules stand still, gets the options from a rank that has data."""
        ranks = roll_call(self._shards, [], joined=joined)
        if any(ranks) and not all(ranks):
            told = {"options": [options_of(group) for group in self._groups]}
            communicator, device = self._shards.communicator, self._shards.device
            told = broadcast_values(communicator, device, told, ranks.index(False), "an update of ZeroRedundancyOptimizer")
            set_options(self._groups, told["options"])
        self._shards.copy_options_in(self._groups)

    def _update(self) -> None:
        if self._reducing is None:
            return
        (bucket, future), self._reducing = self._reducing, None
        reduced = future.wait()
        reduced = reduced[0] if isinstance(reduced, list) else reduced
        if reduced.data_ptr() != bucket.buffer().data_ptr():
            bucket.buffer().copy_(reduced.view(-1))
        entries = []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            if (entry := self._entries.get(parameter)) is not None:
                self._shards.take(entry, gradient)
                entries.append(entry)
        step_locally(self._shards.optimizer, None, {})
        self._shards.drop_gradients(entries)
        self._shards.start_spreading(entries)
