"""What code that knows nothing of layers asks: of which class a block is, and in which order parameters come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support import processes
from tests.support.reference import Turn
from tests.support.stacks import WIDTH, Block, Stack, built, loss_of, stack

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])


class Asking(Stack):
    """Calls its blocks by their class, as models with several kinds of them do."""

    def __init__(self) -> None:
        super().__init__(Block(7), nn.Sequential(nn.Linear(WIDTH, WIDTH)), Block(9))  # type: ignore[arg-type]

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if isinstance(block, Block) else x - block(x) if isinstance(block, nn.Sequential) else x.exp()
        return x


def shard(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    return zero3.shard(model, process_group=group, policy=policy)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_get_trainable_chunk_has_the_order_of_named_parameters(tied: bool, grouped: bool) -> None:
    model = stack(tied=tied)
    model.blocks[1].requires_grad_(False)
    zero3.shard(model)
    if grouped:
        zero3.param_groups(model, lambda name, info: {"weight_decay": 0.1 if info.ndim > 1 else 0.0})
    chunks = zero3.get_trainable_chunk(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(chunks) == len(trained) > 2
    assert all(one is other for one, other in zip(chunks, trained, strict=True))


def on_a_process(rank: processes.Rank) -> float:
    model = zero3.shard(built(Asking))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    for one, other in zip(optimizer.param_groups[0]["params"], zero3.get_trainable_chunk(model), strict=True):
        assert one is other
    with zero3.resident(model):
        return loss_of(model, Turn(0, 0, 1)).item()
