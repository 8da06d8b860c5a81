"""Layers of one size whose order the caller chooses, so that what is meant for one of them would fit another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zero3 import ShardingPolicy, Zero3Layer


class Routed(nn.Module):
    """Three layers of one size, called in an order that the caller chooses: a mix-up would fit."""

    def __init__(self, policy: ShardingPolicy = ShardingPolicy(), group: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Zero3Layer(nn.Linear(4, 4), policy=policy, process_group=group) for _ in range(3))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.layers[index](x)
        return x


def gather_others(model: nn.Module, rank: int) -> None:
    """With a layer around `Routed`, without prefetching: both ranks gather five times, the fourth and fifth time other layers."""
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        torch.autograd.grad(model(x, (0, 1, 2)).sum(), x)
    y = model(x, (0, 1, 2)).sum()
    if rank == 0:
        torch.autograd.grad(y, x)  # gathers 1 and 0
    else:
        model(x, (0, 1))
