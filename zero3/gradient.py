"""The flat gradient of a chunk: gathered from autograd one parameter at a time, backed up to the rank's slice of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .chunk import Chunk
from .collectives import Communicator
from .flat import view, zero_padding
from .shard_gradient import ShardGradient
from .streams import Done, Lane, Mark

__all__: list[str] = []


class Backup(NamedTuple):
    """A reduction on its way. Its buffers live until compute has waited for it: only then may they be handed out again."""

    mark: Mark
    held: tuple[Tensor, ...]
    naming: AbstractContextManager[None]

    def wait(self) -> None:
        with self.naming:
            self.mark.wait()


class FlatGradient:
    """Adds up the gradients of a chunk's parameters in one buffer `[W*S]`, from the first that comes to `backup`.

    Nothing is counted: a slot that got no gradient is zero, one that got several holds their sum.
    """

    def __init__(self, chunk: Chunk, communicator: Communicator, *, mean: bool, naming: AbstractContextManager[None]) -> None:
        self._chunk = chunk
        self._communicator = communicator
        self._mean = mean
        self._naming = naming  # of the layer, around transfers that may fail
        self._full: Tensor | None = None  # 1-D [W*S]
        self._written: set[int] = set()
        self.on_first: Callable[[], None] | None = None

    @property
    def pending(self) -> bool:
        """Whether gradients have come in that no backup has taken."""
        return self._full is not None

    def add(self, index: int, gradient: Tensor) -> None:
        """Takes in the gradient of slot number `index`."""
        if self._full is None:
            self._full = self._chunk.shard.new_empty(self._chunk.layout.padded_numel)
            if self.on_first is not None:
                self.on_first()
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        slot = view(self._full, self._chunk.layout, index)
        if index in self._written:
            slot.add_(gradient)
        else:
            self._written.add(index)
            slot.copy_(gradient)

    def back_up(self, lane: Lane, communicator: Communicator) -> Backup:
        """Begins to reduce what has come in (zeros, if nothing has) into this rank's slice; frees this object's buffer."""
        full = self._take()
        shard = full if communicator.world_size == 1 else full.new_empty(self._chunk.layout.shard_numel)
        with self._naming, lane.issue():
            pending = Done() if shard is full else communicator.reduce_scatter(shard, full)
            mark = lane.complete(pending, lambda: self._land(shard))
        return Backup(mark, (full, shard), self._naming)

    def drop(self) -> None:
        self._full = None
        self._written.clear()

    def _take(self) -> Tensor:
        full, layout = self._full, self._chunk.layout
        if full is None:
            return torch.zeros(layout.padded_numel, dtype=self._chunk.shard.dtype, device=self._chunk.shard.device)
        for index in range(len(layout.slots)):
            if index not in self._written:
                view(full, layout, index).zero_()
        zero_padding(full, layout)
        self.drop()
        return full

    @torch.no_grad()
    def _land(self, gradient: Tensor) -> None:
        """`gradient` `[S]`, the sum over ranks, becomes or joins the chunk's. The chunk is in no graph: its hooks are called here."""
        if self._communicator.world_size > 1:
            if self._mean:
                gradient.div_(self._communicator.world_size)
            gradient = ShardGradient.of(gradient, self._communicator)
        for part in self._chunk.parts:
            if part.parameter.requires_grad:
                _accumulate(part.parameter, gradient if part.parameter is self._chunk.shard else gradient[part.start : part.stop])


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    """As autograd would: the parameter is in no graph, so its hooks are called here."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    if parameter.grad is not None:
        parameter.grad.add_(gradient)
    else:
        parameter.grad = gradient
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
