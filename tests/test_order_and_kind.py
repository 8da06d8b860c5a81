"""What code that knows nothing of layers asks: of which class a block is, and in which order parameters come."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

import zero3
from tests.support.reference import check_parity
from tests.support.stacks import WIDTH, Block, Stack, built, stack, train

WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])


class Asking(Stack):
    """Calls its blocks by their class, as models with several kinds of them do, in the two ways that docs/migrating.md names."""

    def __init__(self) -> None:
        super().__init__(Block(7), nn.Sequential(nn.Linear(WIDTH, WIDTH)), Block(9))  # type: ignore[arg-type]

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            kind = getattr(block, "kind", None)
            assert (kind == "full") == isinstance(getattr(block, "module", block), Block)
            x = block(x) if kind == "full" else x - block(x)
        return x


def shard(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    return zero3.shard(model, process_group=group, policy=policy)


@WORLDS
def test_a_model_may_ask_what_its_blocks_are(world_size: int) -> None:
    check_parity(lambda: built(Asking), train, world_size=world_size, shard=shard)


def test_a_tool_that_hooks_each_block_counts_it_once() -> None:
    """So a layer is no `Block` itself: it stands in `modules()` beside its module."""
    model: Any = zero3.shard(stack())
    assert [sum(isinstance(module, Block) for module in layer.modules()) for layer in model.blocks] == [1, 1, 1]
    assert not any(isinstance(layer, Block) for layer in model.blocks)


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
