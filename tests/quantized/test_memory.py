"""What of a quantised base is in memory, on the wire and at rest: bytes, and one matrix at a time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.live import LiveBytes
from tests.support.models import WORLDS
from tests.support.quantised_bases import INNER, WIDTH, blocks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import in_sequence, process_group
from zero3 import NF4, ShardingPolicy

pytestmark = pytest.mark.slow


class Wide(nn.Module):
    """Frozen matrices of 1 MB in fp32, and few activations. One way for linear layers, one for experts."""

    WIDTH = 512

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(6)])
        self.num_experts = 2
        self.experts = nn.Parameter(torch.randn(2, self.WIDTH, self.WIDTH) / 20) if experts else None
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(self.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if self.experts is None:
            return x
        x = torch.tanh(x @ self.experts[0].t())  # the graph saves that very matrix, and then a view of a view of one
        return nn.functional.linear(x, self.experts[1].t())


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_quantized_matrices_exist_one_at_a_time(experts: bool, autocast: bool, checkpointed: bool) -> None:
    """In forward and in backward; none between them. Beside it are intermediate results of a slice of 2**20 elements at most."""
    model = zero3.Zero3Layer(Wide(experts), policy=ShardingPolicy(quantize=NF4()))
    x, memory = torch.randn(3, Wide.WIDTH), LiveBytes()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return (checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)).float().sum()

    loss().backward()
    losses: list[Tensor] = []
    with memory:
        forward = memory.peak_of(lambda: losses.append(loss()))
        between = memory.now
        backward = memory.peak_of(losses.pop().backward)
    one, base = 4 * Wide.WIDTH**2, 6 * NF4().nbytes((Wide.WIDTH, Wide.WIDTH)) + experts * NF4().nbytes((2, Wide.WIDTH, Wide.WIDTH))
    assert one < forward - base < 2.7 * one  # a matrix in fp32, or half of that in bf16; its values before the scales in fp32; codes
    assert one < backward - base < 2.7 * one
    assert between - base < 0.1 * one


@WORLDS
def test_quantized_layers_travel_as_bytes(world_size: int) -> None:
    """One message a gather, which holds the scales too, and twice a step; at rest each rank holds its share of these bytes."""
    kind = NF4()

    def body(group: ThreadCommunicator) -> None:
        model = in_sequence(models[group.rank], process_group(group), ShardingPolicy(quantize=kind))
        chunks = [chunk for chunk in model.parameters() if chunk.dtype == torch.uint8]
        nbytes = sum(kind.nbytes(shape) for shape in ((INNER, WIDTH), (WIDTH, INNER)))
        assert [chunk.nbytes for chunk in chunks] == [-(-nbytes // world_size)] * 3
        before = len(group.log)
        model(torch.randn(2, 5, WIDTH, dtype=torch.float64)).sum().backward()
        gathers = [c for c in group.log[before:] if c.kind == "all_gather" and c.dtype == torch.uint8]
        assert [c.numel for c in gathers] == ([world_size * -(-nbytes // world_size)] * 5 if world_size > 1 else [])
        stored = zero3.report(model).chunks
        assert stored["frozen nf4(64, double)"] == sum(chunk.nbytes for chunk in chunks)
        assert "frozen uint8" not in stored
        assert zero3.report(model).parameters == sum(p.numel() for p in blocks().parameters())

    models = [blocks() for _ in range(world_size)]
    run_ranks(world_size, body)
