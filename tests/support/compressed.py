"""Training with compressed transfers, and its simulation in one process: plain Python and torch, and nothing of zero3's quantisation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import ONE_GENERATOR
from zero3 import Float8, Int8, ShardingPolicy

WIDTH = 24  # layers of 24 * 24 + 24 elements: their slices are no multiple of a block
DEPTH = 3
RATE = 0.1
EACH_FORMAT = pytest.mark.parametrize("kind", [Int8(), Int8(block_size=7), Int8(10**4), Float8(), Float8(block=(3, 5))], ids=str)
EACH_SIZE = pytest.mark.parametrize("world_size", [2, 3])


# -- the simulation: plain Python and torch, without anything of zero3's quantisation


def rounded(values: Tensor, kind: Any) -> Tensor:
    """What a 1-D tensor is after it was quantised: block after block, from its first element on."""
    size = kind.block_size if isinstance(kind, Int8) else kind.block[1]
    found = []
    for start in range(0, values.numel(), size):
        block = values[start : start + size].float()
        largest = 127 if isinstance(kind, Int8) else 448
        scale = block.abs().max() / largest
        quotients = block / scale if scale else torch.zeros_like(block)
        codes = quotients.round().clamp(-127, 127) if isinstance(kind, Int8) else quotients.to(torch.float8_e4m3fn).float()
        found.append(codes * scale)
    return torch.cat(found) if found else values.float()


def in_slices(flat: Tensor, world_size: int) -> Iterator[Tensor]:
    """The slices of a flat tensor, as ranks hold them: of equal length, with zeros at the end."""
    length = -(-flat.numel() // world_size)
    return iter(torch.cat([flat, flat.new_zeros(length * world_size - flat.numel())]).split(length))


def flat_of(layer: nn.Module) -> Tensor:
    """As a chunk has them: parameters whose length is a multiple of 16 first."""
    tensors = sorted(layer.parameters(), key=lambda p: p.numel() % 16 != 0)
    return torch.cat([p.detach().reshape(-1) for p in tensors])


def put(flat: Tensor, layer: nn.Module, gradients: bool = False) -> None:
    start = 0
    for p in sorted(layer.parameters(), key=lambda p: p.numel() % 16 != 0):
        part = flat[start : start + p.numel()].view(p.shape)
        start += p.numel()
        if gradients:
            p.grad = part.clone()
        else:
            p.data = part.clone()


def simulated(
    world_size: int, policy: ShardingPolicy, steps: int, micro_batches: int = 1, norm: float | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """The masters after the last step, flat, layer by layer; and the losses of each step, rank by rank."""
    model, losses = build(), []
    masters = [flat_of(layer) for layer in model]
    dtype = policy.param_dtype or torch.float32
    for step in range(steps):
        for layer, master in zip(model, masters, strict=True):
            shown = master
            if policy.gather_format is not None:
                shown = torch.cat([rounded(each, policy.gather_format) for each in in_slices(master, world_size)])
            put(shown.to(dtype), layer)
        sums: list[list[Tensor]] = [[] for _ in model]
        for rank in range(world_size):
            added: list[Tensor] | None = None
            for micro in range(micro_batches):
                model.zero_grad()
                loss = loss_of(model, rank, micro_batches * step + micro, dtype)
                losses.append(loss.detach())
                loss.backward()
                own = [torch.cat([p.grad.reshape(-1) for p in ordered(layer)]).to(policy.reduce_dtype or dtype) for layer in model]
                added = own if added is None else [a + b for a, b in zip(added, own, strict=True)]
            assert added is not None
            for number, gradient in enumerate(added):
                kind = policy.reduce_format
                sums[number].append(
                    gradient.float() if kind is None else torch.cat([rounded(each, kind) for each in in_slices(gradient, world_size)])
                )
        for number, (master, found) in enumerate(zip(masters, sums, strict=True)):
            total = found[0]
            for other in found[1:]:
                total = total + other
            masters[number] = torch.add(master, total[: master.numel()] / world_size, alpha=-RATE)  # as SGD does
    return masters, losses


def ordered(layer: nn.Module) -> list[Any]:
    return sorted(layer.parameters(), key=lambda p: p.numel() % 16 != 0)


def build() -> nn.Sequential:
    with ONE_GENERATOR:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))


def loss_of(model: nn.Module, rank: int, number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank)).to(dtype)
    loss: Tensor = model(x).pow(2).sum()
    return loss


# -- the real thing


def masters_of(model: nn.Module) -> list[Tensor]:
    with zero3.full_params(model):
        return [flat_of(layer.module) for layer in model]


def sharded(group: Any, policy: ShardingPolicy) -> zero3.Zero3Sequential:
    return zero3.Zero3Sequential([zero3.Zero3Layer(layer, policy=policy, process_group=group) for layer in build()])


def train(group: Any, policy: ShardingPolicy, steps: int, micro_batches: int = 1) -> tuple[list[Tensor], list[Tensor]]:
    model, losses = sharded(group, policy), []
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=RATE)
    for step in range(steps):
        for micro in range(micro_batches):
            with zero3.no_sync(model) if micro < micro_batches - 1 else nullcontext():
                loss = loss_of(model, group.rank, micro_batches * step + micro, policy.param_dtype or torch.float32)
                losses.append(loss.detach())
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return masters_of(model), losses


BOTH = ShardingPolicy(gather_format=Int8(), reduce_format=Int8(block_size=32))
