"""What gates cost: a step on text alone, of a model with towers and of the same model without, and an exchange beside a small gather.

torchrun --nproc-per-node 2 benchmarks/towers/main.py [--layers 8] [--milliseconds 20] [--rounds 40]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
import zero3
from zero3.comm.factory import communicator_for, in_memory

CPU = torch.device("cpu")


class _Takes(torch.autograd.Function):
    """Takes its time in forward and in backward, as a device does on which the host waits. No noise of other processes is in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(_Takes.apply(x, self.seconds)))  # type: ignore[no-untyped-call]


class Body(nn.Module):
    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.embed, self.vision = nn.Embedding(32, width), nn.Sequential(*(Block(width, seconds) for _ in range(4)))
        self.language = nn.Sequential(*(Block(width, seconds) for _ in range(layers)))

    def forward(self, words: Tensor, image: Tensor | None) -> Tensor:
        x = self.embed(words)
        return self.language(x if image is None else x + self.vision(image))


class Seeing(nn.Module):
    """Its head is outside of what has the tower, as in models of transformers."""

    def __init__(self, layers: int, width: int, seconds: float) -> None:
        super().__init__()
        self.body, self.head = Body(layers, width, seconds), nn.Linear(width, 2)

    def forward(self, words: Tensor, image: Tensor | None = None) -> Tensor:
        return self.head(self.body(words, image))


def took(milliseconds: list[float], what: Callable[[], object]) -> None:
    dist.barrier()
    began = time.perf_counter()
    what()
    milliseconds.append(1000 * (time.perf_counter() - began))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=20, help="that a layer takes in forward, and again in backward")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    words = torch.randint(32, (2, 8))
    models = {}
    for name, optional in {"without towers": (), "with towers": "body.vision"}.items():
        torch.manual_seed(0)
        model = Seeing(given.layers, given.width, given.milliseconds / 1000)
        models[name] = zero3.shard(model, [Block, nn.Embedding, nn.Linear], optional=optional)
    steps: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(given.rounds + 3):  # they take turns
        for name, model in models.items():
            took(steps[name], lambda model=model: model(words).square().mean().backward())
    communicator = communicator_for(None, CPU)
    near, shard = in_memory(communicator), torch.zeros(256 // dist.get_world_size())
    full = torch.zeros(256)
    ways: dict[str, Callable[[], object]] = {
        "gather of 1 KB": lambda: communicator.all_gather(full, shard).wait(),
        "exchange of 16 bytes": lambda: near.exchange(bytes(16), CPU),
        "exchange by sockets": lambda: communicator.exchange(bytes(16), CPU),
    }
    single: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(1000):
        for name, way in ways.items():
            took(single[name], way)
    if dist.get_rank() == 0:
        for what, of in {"median": statistics.median, "first decile": lambda each: statistics.quantiles(each, n=10)[0]}.items():
            before, after = (of(each[3:]) for each in steps.values())
            print(f"a step on text, {what}: {before:.2f} ms without towers, {after:.2f} ms with towers, {after / before:.4f} x")
        print("; ".join(f"{name} {statistics.median(each):.3f} ms" for name, each in single.items()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
