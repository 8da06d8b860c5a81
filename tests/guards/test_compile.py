"""torch.compile of the blocks inside layers: the same numbers, and compiled once for all layers and steps."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import cross_entropy

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.stacks import WIDTH, WORDS, Block, Stack, built
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # inductor imports it

DEPTH, STEPS = 4, 4
compilers = pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")),
    ],
)


def stack() -> Stack:
    return built(lambda: Stack(*[Block() for _ in range(DEPTH)]))


def words(step: int, ranks: range) -> Tensor:
    drawn = [torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(100 * step + rank)) for rank in ranks]
    return torch.cat(drawn)


def trained(model: nn.Module, parameters: Any, ranks: range) -> list[float]:
    optimizer = torch.optim.AdamW(parameters, lr=0.02)
    losses = []
    for step in range(STEPS):
        batch = words(step, ranks)
        loss = cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compiled(rank: Rank, backend: str, param_dtype: torch.dtype | None) -> tuple[list[float], dict[str, Tensor], int]:
    warnings.filterwarnings("ignore", "The .grad attribute")  # dynamo looks, whoever's tensor it is
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # inductor imports it
    torch.compiler.reset()
    counters.clear()
    model = stack()
    for block in model.blocks:
        block.compile(backend=backend)
    zero3.shard(model, policy=ShardingPolicy(param_dtype=param_dtype, reduce_dtype=torch.float64))
    losses = trained(model, zero3.get_trainable_chunk(model), range(rank.number, rank.number + 1))
    return losses, zero3.full_state_dict(model, rank0_only=False), counters["stats"]["unique_graphs"]


@pytest.mark.slow
@compilers
def test_compile_blocks_of_a_sharded_model(backend: str) -> None:
    results = on_ranks(2, compiled, backend, None, group_timeout=200)
    plain = stack()
    union = trained(plain, plain.parameters(), range(2))
    for _, values, graphs in results:
        assert graphs == 1, "one graph for all layers and steps"
        for name, value in plain.state_dict().items():
            assert torch.allclose(values[name], value, rtol=0, atol=1e-10), name
    for step in range(STEPS):
        assert sum(result[0][step] for result in results) / 2 == pytest.approx(union[step], abs=1e-10)


@pytest.mark.slow
def test_compile_in_mixed_precision() -> None:
    """Against the same casts without compilation."""
    one, other = (on_ranks(2, compiled, backend, torch.float32, group_timeout=200)[0] for backend in ("aot_eager", "eager"))
    assert one[2] == 1
    assert one[0] == pytest.approx(other[0], abs=1e-6)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.slow
@compilers
@pytest.mark.parametrize("in_place", [True, False], ids=["module.compile()", "torch.compile(module)"])
def test_compile_layers_one_by_one(backend: str, in_place: bool) -> None:
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    blocks = [Residual().double() for _ in range(DEPTH)]
    plain = nn.Sequential(*(Residual().double() for _ in range(DEPTH)))
    plain.load_state_dict(nn.Sequential(*blocks).state_dict())
    for block in blocks if in_place else ():
        block.compile(backend=backend)
    model = Zero3Sequential([Zero3Layer(block if in_place else torch.compile(block, backend=backend)) for block in blocks])
    x = torch.randn(6, WIDTH, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        for net in (model, plain):
            net(x).pow(2).mean().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(parameter.grad)
            net.zero_grad()
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.allclose(model(x), plain(x), rtol=0, atol=1e-12)
