"""What only a GPU shows: streams, the caching allocator, NCCL. Marked `gpu`: where there is none, the simulated device takes its place.

pytest -m gpu                            as it stands
TORCH_CUDA_SANITIZER=1 pytest -m gpu     torch's own race detector watches every kernel
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.processes import Rank, on_ranks
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential, clip_grad_norm_, full_state_dict

pytestmark = [
    pytest.mark.slow,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, or the simulated one"),
]
WIDTH, DEPTH, BATCH = 256, 6, 8
# On the simulated device a case of each is enough: there the pairs of capabilities (tests/device) go through any order of streams.
REAL = torch.cuda.is_available() and "tests.device.simulated" not in sys.modules


def blocks(device: str = "cuda", width: int = WIDTH) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(0)
    modules = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(DEPTH)]
    for module in modules:
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.05
    return [module.to(device) for module in modules]


def batch(step: int, rank: int = 0, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(1000 * step + rank)).cuda()


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()


def train(model: nn.Module, parameters: list[nn.Parameter], steps: int, delay: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        loss = model(batch(step)).pow(2).mean()
        loss.backward()
        if delay is not None:
            delay()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def test_world_size_1_on_nccl_gives_the_bits_of_plain_torch(nccl: None) -> None:
    plain = nn.Sequential(*blocks())
    sharded = Zero3Sequential([Zero3Layer(block) for block in blocks()])
    assert train(plain, list(plain.parameters()), 10) == train(sharded, sharded.get_trainable_chunk(), 10)
    for name, value in full_state_dict(sharded).items():
        assert torch.equal(value, plain.state_dict()[name].cpu())


def _two_ranks_on_one_gpu(me: Rank, depth: int, delay_kernels: bool) -> None:
    """gloo through host memory: NCCL refuses two ranks on one device. Streams, events and the allocator are the real ones."""
    rank = me.number
    torch.cuda.set_device(0)
    sharded = Zero3Sequential([Zero3Layer(block, policy=ShardingPolicy(prefetch_depth=depth)) for block in blocks()])
    plain = nn.Sequential(*blocks())
    mine = torch.optim.SGD(sharded.get_trainable_chunk(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        if delay_kernels:
            torch.cuda._sleep(2_000_000)  # compute falls behind the host: a lane that did not wait would overtake it
        sharded(batch(step, rank)).pow(2).mean().backward()
        total = clip_grad_norm_(sharded, 0.5)
        mine.step()
        mine.zero_grad()
        plain(torch.cat([batch(step, r) for r in range(2)])).pow(2).mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-7)
    for name, value in full_state_dict(sharded, rank0_only=False).items():
        torch.testing.assert_close(value, plain.state_dict()[name].cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("depth", [0, 1, 2] if REAL else [1])
@pytest.mark.parametrize("delay_kernels", [False, True] if REAL else [True])
def test_two_ranks_on_one_gpu_train_as_one_process(depth: int, delay_kernels: bool) -> None:
    on_ranks(2, _two_ranks_on_one_gpu, depth, delay_kernels)


def _memory_of_a_step(me: Rank, depth: int) -> None:
    rank = me.number
    torch.cuda.set_device(0)
    width = 1024
    blocks(width=width)[0](batch(0, rank, width)).sum().backward()  # the workspaces of CUDA's libraries stay for good
    gc.collect()
    before = torch.cuda.memory_allocated()
    sharded = Zero3Sequential([Zero3Layer(block, policy=ShardingPolicy(prefetch_depth=depth)) for block in blocks(width=width)])
    layer = sum(slot.numel for slot in sharded[0]._state.chunks[0].layout.slots) * 4
    shard = layer // 2
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    assert start - before == pytest.approx(DEPTH * shard, rel=0.01), (start, before)
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        sharded(batch(0, rank, width))
    torch.cuda.synchronize()
    activations = 8 * BATCH * width * 4
    assert torch.cuda.max_memory_allocated() - start <= (depth + 1) * layer + activations, (start, torch.cuda.max_memory_allocated())
    assert torch.cuda.memory_allocated() == pytest.approx(start, abs=activations)
    torch.cuda.reset_peak_memory_stats()
    sharded(batch(0, rank, width)).pow(2).mean().backward()
    torch.cuda.synchronize()
    # full layers, the gradient buffer being filled, those being reduced, one parameter's gradient, the gradient shards
    bound = (depth + 1) * layer + layer + max(1, depth) * (layer + shard) + layer // 2 + DEPTH * shard
    assert torch.cuda.max_memory_allocated() - start <= bound + DEPTH * activations, (start, torch.cuda.max_memory_allocated())
    assert torch.cuda.memory_allocated() - start == pytest.approx(DEPTH * shard, rel=0.02)


@pytest.mark.parametrize("depth", [0, 1, 2] if REAL else [0, 2])
def test_a_step_holds_what_the_formula_says(depth: int) -> None:
    if os.environ.get("TORCH_CUDA_SANITIZER"):
        pytest.skip("the sanitizer keeps tensors of its own")
    on_ranks(2, _memory_of_a_step, depth)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_never_waits_for_the_gpu(nccl: None) -> None:
    """No host synchronisation: torch raises at every one of them in this mode."""
    model = Zero3Sequential([Zero3Layer(block) for block in blocks()])
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1, foreach=True)
    x = batch(0)
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            model(x).pow(2).mean().backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
