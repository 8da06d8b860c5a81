"""The flat gradient of a chunk: gathered from autograd one parameter at a time, backed up to the rank's slice of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .chunk import Chunk, Part
from .collectives import Communicator
from .flat import view, zero_padding
from .policy import ShardingPolicy
from .shard_gradient import ShardGradient
from .streams import Done, Lane, Mark

__all__: list[str] = []

_EXACT = "_zero3_exact"  # on a gradient: what it was rounded from, and its version then


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

    def __init__(self, chunk: Chunk, communicator: Communicator, policy: ShardingPolicy, naming: AbstractContextManager[None]) -> None:
        self._chunk = chunk
        self._communicator = communicator
        self._mean = policy.gradient_reduction == "mean"
        self._dtype = policy.gradient_dtype(chunk.shard.dtype)
        # fp16 overflows at 65504: there a part of the mean's division comes before the sum
        self._divide_first = 1 << (communicator.world_size.bit_length() - 1) // 2 if self._mean and self._dtype == torch.float16 else 1
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
            self._full = self._new(self._chunk.layout.padded_numel)
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
        summed = full if communicator.world_size == 1 else full.new_empty(self._chunk.layout.shard_numel)
        dtype = self._chunk.shard.dtype
        landed = summed if dtype == self._dtype else torch.empty_like(summed, dtype=dtype)
        with self._naming, lane.issue():
            if self._divide_first > 1:
                full.div_(self._divide_first)
            pending = Done() if summed is full else communicator.reduce_scatter(summed, full)
            mark = lane.complete(pending, lambda: self._land(summed, landed))
        return Backup(mark, (full, summed, landed), self._naming)

    def drop(self) -> None:
        self._full = None
        self._written.clear()

    def _take(self) -> Tensor:
        full, layout = self._full, self._chunk.layout
        if full is None:
            return self._new(layout.padded_numel).zero_()
        for index in range(len(layout.slots)):
            if index not in self._written:
                view(full, layout, index).zero_()
        zero_padding(full, layout)
        self.drop()
        return full

    def _new(self, numel: int) -> Tensor:
        return self._chunk.shard.new_empty(numel, dtype=self._dtype)

    @torch.no_grad()
    def _land(self, summed: Tensor, landed: Tensor) -> None:
        """`summed` `[S]`, over ranks, becomes or joins the chunk's gradient, by way of `landed`, which has its dtype."""
        narrows = self._dtype.itemsize > self._chunk.shard.dtype.itemsize
        divisor = self._communicator.world_size / self._divide_first if self._mean else 1
        if narrows and divisor != 1:
            summed.div_(divisor)
        if landed is not summed:
            landed.copy_(summed)
        if not narrows and divisor != 1:
            landed.div_(divisor)
        if self._communicator.world_size > 1:
            landed = ShardGradient.of(landed, self._communicator)
        for part in self._chunk.parts:
            if part.parameter.requires_grad:
                _accumulate(part.parameter, _range(landed, part), _range(summed, part) if narrows else None)


def _range(flat: Tensor, part: Part) -> Tensor:
    return flat if part.stop - part.start == flat.numel() else flat[part.start : part.stop]


def _accumulate(parameter: nn.Parameter, gradient: Tensor, exact: Tensor | None) -> None:
    """As autograd would: the parameter is in no graph, so its hooks are called here.

    `exact`: the gradient in a wider dtype. It stays with the parameter's gradient, and sums are made in it, so that
    micro-batches round once and not each; it dies with that gradient, and does not count if somebody changed it.
    """
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient, exact = (gradient, exact) if changed is None else (changed, None)
    if parameter.grad is None:
        parameter.grad = gradient
    elif exact is None:
        parameter.grad.add_(gradient)
    else:
        earlier, version = getattr(parameter.grad, _EXACT, (exact, -1))
        # The sum stays in the older tensor: the newer one is held by its backup until compute has waited for it.
        exact = earlier.add_(exact) if version == parameter.grad._version else exact.add_(parameter.grad)
        parameter.grad.copy_(exact)
    if exact is not None:
        setattr(parameter.grad, _EXACT, (exact, parameter.grad._version))
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
