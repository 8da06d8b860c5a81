"""docs/memory.md as code, and the model that it is checked on.

Batches are empty, so activations and their gradients take no bytes, and all that is counted is weights, gradients and
optimizer state. Layers have sizes that no two sums confuse.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.live import LonelyCommunicator
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential
from zero3.core.layout import ChunkLayout

WIDTHS = (16, 24, 40, 12, 32)
LAYERS = range(len(WIDTHS) - 1)
BYTES = 4  # an fp32 element
SIZES = [[WIDTHS[i] * WIDTHS[i + 1], WIDTHS[i + 1]] for i in LAYERS]  # elements of weight and bias
GIVEN = [sum(each) * BYTES for each in SIZES]  # P: the parameters as the user made them

Point = Callable[[str], None]


class Block(nn.Module):
    def __init__(self, number: int, at: Point, reentrant: bool | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTHS[number], WIDTHS[number + 1])
        self.number, self.at, self.reentrant = number, at, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return self.compute(x)
        return checkpoint(self.compute, x, use_reentrant=self.reentrant)

    def compute(self, x: Tensor) -> Tensor:
        self.at(f"forward of {self.number}")
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda grad: self.at(f"backward of {self.number}"))
        return torch.tanh(x)


class Bytes(NamedTuple):
    """Of an element where it is kept, where it is computed with, and where gradients are summed; the allocator's unit; and the unit of
    elements behind each slice of a reduction, 0 for none.
    """

    stored: int = BYTES
    computed: int = BYTES
    reduced: int = BYTES
    rounded_to: int = 1
    trailers_of: int = 1

    def of(self, numel: int, element: int) -> int:
        """Of one tensor."""
        return -(-numel * element // self.rounded_to) * self.rounded_to


EXACT = Bytes()


class Formula:
    """docs/memory.md as code. W ranks; depth d; of each layer, in bytes: S its chunk, F its full parameters, P its gradients as autograd
    makes them, G its gradient and FG its full gradient, with trailers. `sizes`: the elements of each layer's parameters. `embedding`:
    whether the first layer is one, which backward does not gather."""

    def __init__(
        self,
        world_size: int,
        depth: int,
        *,
        kept: bool = False,
        sizes: Sequence[Sequence[int]] = SIZES,
        unit: Bytes = EXACT,
        embedding: bool = False,
    ) -> None:
        self.first = int(embedding)  # that backward gathers
        self.world_size, self.depth, self.kept, self.sizes, self.unit = world_size, depth, kept, sizes, unit
        slices = [-(-sum(each) // world_size) for each in sizes]
        self.last = len(sizes) - 1
        self.S = [unit.of(each, unit.stored) for each in slices]
        self.F = [unit.of(world_size * each, unit.computed) for each in slices]
        of = unit.trailers_of if world_size > 1 else 0
        behind = [-(-len(each) // of) * of if of else 0 for each in sizes]
        with_trailers = [numel + n for numel, n in zip(slices, behind, strict=True)]
        self.FG = [unit.of(world_size * each, unit.reduced) for each in with_trailers]
        self.G = [unit.of(each, unit.stored) for each in with_trailers]
        self.P = [sum(unit.of(numel, unit.computed) for numel in each) for each in sizes]
        # a reduction holds its buffer and its result; at world size 1 one is the other
        self.travelling = [self.FG[j] + (unit.of(with_trailers[j], unit.reduced) if world_size > 1 else 0) for j in range(len(sizes))]
        # of each layer: what a released parameter shows, and the trailer where all gradients came
        self.apart = [unit.of(1, unit.stored) + unit.of(n, unit.reduced) for n in behind]

    @property
    def chunks(self) -> int:
        return sum(self.S) + sum(self.apart)

    def full(self, layers: range) -> int:
        """Full buffers; at world size 1 the chunk is the full buffer."""
        return 0 if self.world_size == 1 else sum(self.F[i] for i in layers)

    def forward_of(self, i: int) -> int:
        return self.full(range(0 if self.kept else i, min(i + self.depth, self.last) + 1))

    def between(self) -> int:
        return self.full(range(0 if self.kept else self.last, self.last + 1))

    def backward_of(self, i: int, *, accumulating: bool, over: bool = False) -> int:
        """Full parameters of i and those prefetched, gradients that travel, gradients that have landed.

        `over`: at its end, when the first of those on their way has been waited for, so that its own can follow.
        """
        travels = range(i + 1, min(i + self.depth - over, self.last) + 1)
        fetched = self.full(range(0 if self.kept else max(self.first, i - self.depth), i + 1))
        travelling = sum(self.travelling[j] for j in travels)
        landed = sum(self.G) if accumulating else sum(self.G[travels.stop :])
        return fetched + travelling + landed

    def peak_of_backward_of(self, i: int, *, accumulating: bool) -> int:
        """When the last gradient of i has come in; or when all are about to be copied into the buffer that travels, and i is released."""
        before = self.backward_of(i, accumulating=accumulating)
        later = self.backward_of(i, accumulating=accumulating, over=self.depth > 0) - self.full(range(max(self.first, i), i + 1))
        return self.P[i] + max(before, later + self.FG[i])


class GlooFormula(Formula):
    """Gradients travel from where autograd made them. `near`: through memory of the host, which is not tensors'."""

    def __init__(self, world_size: int, depth: int, rank: int, *, near: bool) -> None:
        super().__init__(world_size, depth)
        for i in LAYERS:
            layout = ChunkLayout.build([("weight", (WIDTHS[i + 1], WIDTHS[i])), ("bias", (WIDTHS[i + 1],))], world_size)
            needed = set(layout.cuts[rank])
            copied = 0 if near else (world_size - 1) * self.G[i]  # what is sent is a slice and a trailer, side by side
            padding = sum(stop for slot, _, stop in needed if slot == len(layout.slots)) * BYTES
            gradients = sum(layout.slots[slot].numel for slot in {slot for slot, _, _ in needed} if slot < len(layout.slots)) * BYTES
            received = 0 if near else (world_size - 2) * self.G[i]  # before it is added up, but for the first
            self.travelling[i] = gradients + padding + copied + received + self.G[i]


def wrap(module: nn.Module, world_size: int | None, rank: int = 0, **policy: Any) -> Zero3Layer:
    group = LonelyCommunicator(world_size, rank) if world_size is not None else None
    return Zero3Layer(module, process_group=group, policy=ShardingPolicy(**policy))


def make(
    world_size: int | None,  # None: the default process group
    at: Point = lambda name: None,
    rank: int = 0,
    reentrant: bool | None = None,
    frozen: tuple[int, ...] = (),
    **policy: Any,
) -> Zero3Sequential:
    blocks = [Block(number, at, reentrant) for number in LAYERS]
    for number in frozen:
        blocks[number].requires_grad_(False)
    return Zero3Sequential([wrap(block, world_size, rank, **policy) for block in blocks])
