"""torch.compile of blocks with quantised weights: the same numbers. Graphs end where a quantised weight is used, and go on behind it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.quantised_bases import Adapted, is_base, plain_losses, seeded, sharded_losses
from zero3 import NF4, ShardingPolicy


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Adapted() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def compiled(rank: Rank, backend: str, when: str) -> tuple[list[float], int]:
    warnings.filterwarnings("ignore", "The .grad attribute")  # dynamo looks, whoever's tensor it is
    torch.compiler.reset()
    counters.clear()
    model = seeded(Blocks, NF4(), lambda *_: False)()
    for block in model.blocks if when == "before" else ():
        block.compile(backend=backend)
    model = zero3.shard(model, Adapted, policy=ShardingPolicy(quantize=NF4()))
    for block in model.blocks if when == "after" else ():
        block.compile(backend=backend)
    model = torch.compile(model, backend=backend) if when == "whole" else model
    return sharded_losses(model), counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "when"), [("aot_eager", "before"), ("eager", "after"), ("aot_eager", "whole")])
def test_compile_blocks_with_quantized_weights(backend: str, when: str) -> None:
    expected = plain_losses(seeded(Blocks, NF4(), is_base))
    for losses, graphs in on_ranks(2, compiled, backend, when, group_timeout=200):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert 0 < graphs < 10, "the same graphs for all layers and steps"
