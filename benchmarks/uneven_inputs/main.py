"""What torch's Join costs a sharded model: milliseconds an iteration without it, in it, and when one rank is out of data.

torchrun --nproc-per-node 2 benchmarks/uneven_inputs/main.py [--layers 8] [--width 256] [--iterations 20]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
import zero3


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(width, width // 32, 4 * width, batch_first=True, dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = zero3.Zero3Sequential([zero3.Zero3Layer(Block(options.width)) for _ in range(options.layers)])
    optimizer = torch.optim.AdamW(model.get_trainable_chunk(), lr=1e-4)
    batch = torch.randn(4, 64, options.width)

    def update() -> None:
        zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    uneven = zero3.joinable(model, update)

    def iterations(number: int) -> list[float]:
        took = []
        for _ in range(number):
            began = time.perf_counter()
            model(batch).square().mean().backward()
            uneven.step()
            took.append(1000 * (time.perf_counter() - began))
        return took

    times: dict[str, list[float]] = {"without Join": [], "in Join, all have data": [], "one rank has none": []}
    iterations(3)
    for _ in range(options.rounds):
        times["without Join"] += iterations(options.iterations)
        with Join([uneven]):
            times["in Join, all have data"] += iterations(options.iterations)
            if dist.get_rank() > 0:
                times["one rank has none"] += iterations(options.iterations)
    if dist.get_rank() == 1:
        first = statistics.median(times["without Join"])
        for name, taken in times.items():
            print(f"{name:24} {statistics.median(taken):7.1f} ms, {statistics.median(taken) / first:.2f} x")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
