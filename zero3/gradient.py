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
from .shard_gradient import AwaitedGradient, PieceGradient, ShardGradient, WholeGradient
from .streams import Done, Lane, Mark

__all__: list[str] = []

TOKENS = "_zero3_tokens"  # on a gradient: over how many tokens it is the mean, 0-dim, and its version then
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
    """Adds up the gradients of a chunk's parameters in one buffer `[W*S]`, from the first that comes to `back_up`.

    Nothing is counted: a slot that got no gradient is zero, one that got several holds their sum. `keep` instead of `back_up`
    leaves the sum for a later backward to add to and to reduce, unless the optimizer's gradients are zeroed meanwhile.
    """

    def __init__(self, chunk: Chunk, communicator: Communicator, policy: ShardingPolicy, naming: AbstractContextManager[None]) -> None:
        self._chunk = chunk
        self.communicator = communicator
        self.averaged_over = communicator.world_size  # ranks; fewer where some have run out of data
        self._mean = policy.gradient_reduction == "mean"
        self._dtype = policy.gradient_dtype(chunk.shard.dtype)
        # fp16 overflows at 65504: there a part of the mean's division comes before the sum
        self._divide_first = 1 << (communicator.world_size.bit_length() - 1) // 2 if self._mean and self._dtype == torch.float16 else 1
        self._naming = naming  # of the layer, around transfers that may fail
        self._full: Tensor | None = None  # 1-D [W*S]
        self._written: set[int] = set()
        self._kept: list[tuple[Part, Tensor, int]] = []  # what the optimizer saw, and its version, when the sum was kept
        self.on_first: Callable[[], None] | None = None
        self.pending = False  # gradients have come in, in this backward, that no backup has taken
        self.owed = False  # an earlier backward has left its reduction to a later one

    def add(self, index: int, gradient: Tensor) -> None:
        """Takes in the gradient of slot number `index`."""
        if not self.pending:
            self.pending = True
            if self.on_first is not None:
                self.on_first()
        if self._full is None:
            self._full = self._new(self._chunk.layout.padded_numel)
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
        summed = full if communicator.world_size == 1 else full.new_empty(self._chunk.shard.numel())
        dtype = self._chunk.shard.dtype
        landed = summed if dtype == self._dtype else torch.empty_like(summed, dtype=dtype)
        with self._naming, lane.issue():
            if self._divide_first > 1:
                full.div_(self._divide_first)
            pending = Done() if summed is full else communicator.reduce_scatter(summed, full, self._chunk.layout.bounds)
            mark = lane.complete(pending, lambda: self._land(summed, landed))
        return Backup(mark, (full, summed, landed), self._naming)

    def keep(self, look: Callable[[], bool]) -> None:
        """Leaves what has come in for a later backward. Until then the optimizer's gradients are such that it can't use them."""
        self.pending, self.owed = False, True
        for part in self._chunk.parts:
            parameter = part.parameter
            if parameter.requires_grad and (parameter.grad is None or isinstance(parameter.grad, AwaitedGradient)):
                parameter.grad = AwaitedGradient.like(parameter, look)
            if parameter.grad is not None:
                vars(parameter.grad).pop(TOKENS, None)
        seen = [(part, part.parameter.grad) for part in self._chunk.parts]
        self._kept = [(part, gradient, gradient._version) for part, gradient in seen if gradient is not None]

    @property
    def unseen(self) -> bool:
        """Whether what is kept is to join gradients of other ranks only, so that nobody here could zero them."""
        return self.owed and not self._kept

    def forget_zeroed(self) -> bool:
        """Between backwards: drops what was kept, if the gradients that it was to join have been zeroed since."""
        for part, gradient, version in self._kept:
            now = part.parameter.grad
            if now is None or (isinstance(now, AwaitedGradient) and now.zeroed):
                self.drop()
                return True
            if self._full is not None and not isinstance(now, AwaitedGradient) and now is gradient and now._version != version:
                self._full.mul_(now.as_subclass(Tensor).any())  # in place: without asking the device what it holds
        return False

    def scale(self, factor: Tensor, look: Callable[[], bool]) -> None:
        """Multiplies what the chunk's gradient holds, and what was kept to join it, by `factor`, 0-dim."""
        if self._full is not None:
            self._full.mul_(factor)
        for part in self._chunk.parts:
            gradient = part.parameter.grad
            if gradient is not None and not isinstance(gradient, AwaitedGradient):
                exact, version = getattr(gradient, _EXACT, (None, -1))
                if exact is not None and version == gradient._version:
                    gradient.copy_(exact.mul_(factor))
                    setattr(gradient, _EXACT, (exact, gradient._version))
                else:
                    gradient.mul_(factor)
        if self.owed:
            self.keep(look)

    def drop(self) -> None:
        self._full = None
        self._written.clear()
        self._kept = []
        self.pending = self.owed = False

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
        divisor = self.averaged_over / self._divide_first if self._mean else 1
        if narrows and divisor != 1:
            summed.div_(divisor)
        if landed is not summed:
            landed.copy_(summed)
        if not narrows and divisor != 1:
            landed.div_(divisor)
        for part in self._chunk.parts:
            if part.parameter.requires_grad:
                _accumulate(part.parameter, self._guarded(_range(landed, part), part), _range(summed, part) if narrows else None)

    def _guarded(self, gradient: Tensor, part: Part) -> Tensor:
        if self.communicator.world_size == 1:
            return gradient
        kind = WholeGradient if part.whole else PieceGradient if self._chunk.divided else ShardGradient
        return kind.of(gradient, self.communicator)


def _range(flat: Tensor, part: Part) -> Tensor:
    return flat[part.start : part.stop].view(part.parameter.shape)


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
    elif isinstance(parameter.grad, AwaitedGradient):
        parameter.grad.become(gradient)
    elif exact is None:
        parameter.grad.add_(gradient)
    else:
        earlier, version = getattr(parameter.grad, _EXACT, (exact, -1))
        # The sum stays in the older tensor: the newer one is held by its backup until compute has waited for it.
        exact = earlier.add_(exact) if version == parameter.grad._version else exact.add_(parameter.grad)
        parameter.grad.copy_(exact)
    vars(parameter.grad).pop(TOKENS, None)
    if exact is not None:
        setattr(parameter.grad, _EXACT, (exact, parameter.grad._version))
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        hook(parameter)
