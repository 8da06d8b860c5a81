"""`ShardingPolicy(offload=DIR)` on real processes: whose memory it is, ranks without data, and what a killed process leaves behind."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

import zero3
from tests.support.processes import Rank, on_ranks, try_on_ranks
from zero3 import ShardingPolicy

LAYERS, WIDTH = 12, 768


def anonymous() -> int:
    """The bytes that the process holds as its own."""
    gc.collect()
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


def sharded(offload: Any) -> nn.Module:
    torch.manual_seed(0)
    policy = ShardingPolicy(offload=offload)
    return nn.Sequential(*[zero3.Zero3Layer(nn.Linear(WIDTH, WIDTH, bias=False), policy=policy) for _ in range(LAYERS)])


def held(rank: Rank, directory: str | None) -> tuple[int, Tensor]:
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: large tensors give their memory back to the system
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank.number))
    before = anonymous()
    model = sharded(directory)
    for _ in range(2):  # one micro-batch, and one that is added to it
        model(x).pow(2).mean().backward()
    total = sum(chunk.grad.as_subclass(Tensor).double().sum() for chunk in zero3.get_trainable_chunk(model))  # type: ignore[union-attr]
    return anonymous() - before, torch.as_tensor(total)


@pytest.mark.slow
def test_chunks_and_gradients_take_no_anonymous_memory(tmp_path: Path) -> None:
    chunks = LAYERS * WIDTH * WIDTH * 4 // 2
    with_it, without = (on_ranks(2, held, directory, fresh=True) for directory in (str(tmp_path), None))
    for (mine, total), (theirs, expected) in zip(with_it, without, strict=True):
        assert torch.equal(total, expected)
        assert theirs >= 2 * chunks
        assert mine <= theirs - 1.9 * chunks
        assert mine <= 4 * chunks // LAYERS * 2 + (4 << 20), "two full layers, and what python and gloo hold"


def uneven(rank: Rank, directory: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)]
    model = zero3.shard(nn.Sequential(*blocks), layers=blocks, policy=ShardingPolicy(offload=directory))
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1, momentum=0.9)

    def update() -> None:
        zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    joinable = zero3.joinable(model, update)
    with Join([joinable]):
        for step in range(2 + 2 * rank.number):
            model(torch.full((3, 9), float(step + rank.number))).pow(2).mean().backward()
            joinable.step()
    return list(zero3.full_state_dict(model, rank0_only=False).values())


def clipped(rank: Rank, directory: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    policy = ShardingPolicy(offload=directory)
    model = zero3.Zero3Sequential([zero3.Zero3Layer(nn.Sequential(nn.Linear(9, 9), nn.Tanh()), policy=policy) for _ in range(3)])
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
    norms = []
    for step in range(3):
        model(torch.full((3, 9), float(step + rank.number))).pow(2).mean().backward()
        norms.append(zero3.clip_grad_norm_(model, 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [*norms, *zero3.full_state_dict(model, rank0_only=False).values()]


def test_clipping_has_the_same_bits(tmp_path: Path) -> None:
    found, expected = (on_ranks(2, clipped, directory) for directory in (str(tmp_path), None))
    assert all(torch.equal(a, b) for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True))


def test_joinable_has_the_same_bits(tmp_path: Path) -> None:
    found, expected = (on_ranks(2, uneven, directory) for directory in (str(tmp_path), None))
    assert all(torch.equal(a, b) for mine, theirs in zip(found, expected, strict=True) for a, b in zip(mine, theirs, strict=True))


def dies(rank: Rank, directory: str) -> None:
    model = sharded(directory)
    model(torch.ones(1, WIDTH)).sum().backward()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_behind(tmp_path: Path) -> None:
    outcomes = try_on_ranks(2, dies, str(tmp_path), fresh=True)
    assert [outcome.error for outcome in outcomes] == ["killed", "killed"]
    assert not list(tmp_path.iterdir())


def held_by_a_graph(rank: Rank, directory: str | None) -> int:
    """With the C library's own thresholds. At first large tensors are freed, which lets later ones lie in the heap."""
    model = zero3.Zero3Sequential([zero3.Zero3Layer(nn.Sequential(nn.Linear(256, 256), nn.GELU())) for _ in range(6)])
    x = torch.randn(8192, 256)
    with torch.no_grad():
        model(x)
    before = anonymous()
    with zero3.offload_activations(directory, min_bytes=1 << 20) if directory is not None else nullcontext():
        loss = model(x).pow(2).mean()
    found = anonymous() - before
    loss.backward()
    return found


def test_offload_activations_to_a_directory_gives_memory_back_to_the_system(tmp_path: Path) -> None:
    [without], [with_it] = (on_ranks(1, held_by_a_graph, directory, fresh=True) for directory in (None, str(tmp_path)))
    assert without >= 60e6
    assert with_it <= without / 2
