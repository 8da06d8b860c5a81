"""The whole step (forward, backward, optimizer) of a DDP model under optimizers that do and do not spread their state.

    python benchmarks/zero_redundancy/main.py --help

Every system lives in the same processes, and in every round each makes one step, in an order that rotates: what disturbs
the machine disturbs all of them. Ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
import zero3
from benchmarks.common.model import Size, batch, layers

LR = 3e-4


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def torchs(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, **options)


def ours(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return zero3.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=LR, **options)


def ours_overlapping(model: DistributedDataParallel) -> torch.optim.Optimizer:
    optimizer = zero3.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=LR)
    model.register_comm_hook(None, optimizer.hook(model))
    return optimizer


SYSTEMS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "plain AdamW": plain,
    "torch": torchs,
    "torch, bucket view": functools.partial(torchs, parameters_as_bucket_view=True),
    "zero3": ours,
    "zero3, bucket view": functools.partial(ours, parameters_as_bucket_view=True),
    "zero3, overlap": ours_overlapping,
}


class Trainee:
    """One system and its model."""

    def __init__(self, system: str, size: Size) -> None:
        self.model = DistributedDataParallel(nn.Sequential(*layers(size)))
        self.optimizer = SYSTEMS[system](self.model)
        self.losses: list[float] = []

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, float]:
        """Seconds of the whole step, of what follows the backward, and of the processor's work (threads that communicate included)."""
        dist.barrier()
        begin, work = time.perf_counter(), time.process_time()
        loss = nn.functional.cross_entropy(self.model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        after = time.perf_counter()
        self.optimizer.step()
        dist.barrier()
        end, work = time.perf_counter(), time.process_time() - work
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        return end - begin, end - after, work


def one_rank(rank: int, rendezvous: str, args: argparse.Namespace, size: Size, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=args.ranks, timeout=timedelta(seconds=300))
    trainees = {system: Trainee(system, size) for system in args.systems}
    seconds: dict[str, list[tuple[float, float, float]]] = {system: [] for system in args.systems}
    for number in range(args.warmup + args.rounds):
        ids, labels = batch(size, number, rank)
        turn = number % len(args.systems)
        for system in [*args.systems[turn:], *args.systems[:turn]]:
            took = trainees[system].step(ids, labels)
            if number >= args.warmup:
                seconds[system].append(took)
    if rank == 0:
        results.put({"seconds": seconds, "losses": {system: trainee.losses for system, trainee in trainees.items()}})
    dist.barrier()
    dist.destroy_process_group()


def table(report: dict[str, Any], reference: str) -> str:
    """Medians; ratios are taken round by round, and their spread is that of the middle half."""
    columns = ["system", "ms a step", "after the backward", "ms of work", "x torch's step", "x torch's work", "largest difference of loss"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    seconds = report["seconds"]
    first = next(iter(report["losses"].values()))
    for system, took in seconds.items():
        cells = [f"{statistics.median(step[place] for step in took) * 1e3:.0f}" for place in (0, 1, 2)]
        for place in (0, 2):
            every = sorted(own[place] / other[place] for own, other in zip(took, seconds.get(reference, took), strict=True))
            quarter = len(every) // 4
            cells.append(f"{statistics.median(every):.2f} ({every[quarter]:.2f} to {every[-1 - quarter]:.2f})")
        difference = max(abs(a - b) for a, b in zip(report["losses"][system], first, strict=True))
        rows.append(f"| {system} | {' | '.join(cells)} | {difference:.1e} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Size.add_flags(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="measured steps of every system")
    parser.add_argument("--warmup", type=int, default=3, help="steps before, in which DDP rebuilds its buckets")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="SYSTEM", help=", ".join(SYSTEMS))
    parser.add_argument("--output", type=Path, help="a JSON file for all that was measured")
    args = parser.parse_args()
    size = Size.from_flags(args)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        mp.start_processes(one_rank, (f"{directory}/rendezvous", args, size, results), nprocs=args.ranks, start_method="spawn")
    report = results.get()
    print(table(report, "torch"))
    if args.output:
        args.output.write_text(json.dumps({"torch": torch.__version__, "size": asdict(size), "ranks": args.ranks, **report}, indent=1))


if __name__ == "__main__":
    main()
