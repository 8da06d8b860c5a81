"""Predicts the steps that benchmarks/fabric measured: one constant, fitted at two rates, tells the steps at the others.

    python -m benchmarks.plan.fabric

The measured steps are the tables of benchmarks/fabric/README.md. The speed of computation is that of the same run's "no
communication". Beside each prediction stands the null hypothesis: the larger of computation and the bytes over the rate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero3
from benchmarks.common.model import Size, layers, loss_of
from benchmarks.common.report import markdown
from zero3.planning.absent import Issued
from zero3.planning.cluster import LINK, Cluster, replay
from zero3.planning.trace import Trace
from zero3.planning.work import Work

MEASURED = Path(__file__).parents[1] / "fabric" / "README.md"
FITTED = (1.0, 5.0)  # Gbit/s: one of each of the two runs, whose computation differs by a twentieth
SHARE = 1448 / 1514  # of a link's rate is data: the rest of a frame is headers of Ethernet, IP and TCP
SIZE = Size(batch=8)  # of what was measured
HOST_COSTS = [number * 1e-10 for number in range(31)]  # seconds of processor time a byte


@dataclass(frozen=True)
class Measured:
    """A step of zero3, and of no communication in the same run, in seconds."""

    gbits: float
    computing: float
    seconds: float


def measured() -> list[Measured]:
    found, computing = [], 0.0
    of_two_ranks = MEASURED.read_text().partition("\n## Two ranks at each end")[0]
    for line in of_two_ranks.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")] if line.startswith("|") else []
        time = re.match(r"(\d+) \(", cells[2]) if len(cells) > 2 else None
        if "no communication" in line:
            computing = int(re.search(r"(\d+) \(", line)[1]) / 1e3  # type: ignore[index]
        elif len(cells) > 2 and cells[1] == "zero3" and time:
            found.append(Measured(float(cells[0]), computing, int(time[1]) / 1e3))
    return found


@cache
def events(
    policy: zero3.ShardingPolicy = zero3.ShardingPolicy(), size: Size = SIZE, ranks: int = 2, replicas: int = 1, micro_batches: int = 1
) -> list[Any]:
    """A step of the benchmark's model on rank 0."""
    with torch.device("meta"):
        modules = layers(size)

    def loss(model: nn.Module, batch: int, sequence: int) -> Tensor:
        ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
        return loss_of(model, ids, ids)

    traced = Trace(
        nn.Sequential(*modules), ranks=ranks, replicas=replicas, policy=policy, device="cpu", optimizer=torch.optim.AdamW, layers=modules,
        loss=loss, accumulating=partial(zero3.no_sync, replicas_only=True),
    )  # fmt: skip
    return traced.events(size.batch, size.sequence, micro_batches)


@cache
def host(computing: float, size: Size = SIZE, micro_batches: int = 1) -> Cluster:
    """A processor as fast as the measured computation."""
    flops, works = 1e11, [event for event in events(size=size, micro_batches=micro_batches) if isinstance(event, Work)]
    for _ in range(20):  # its speed is a share of a sum of maxima: it settles
        found = Cluster(flops=flops, memory_bandwidth=12e9, link=1.0, latency=2e-4, ranks_per_node=1)
        flops *= sum(map(found.computing, works)) / computing
    return found


def predicted(step: list[Any], each: Measured, host_cost: float, size: Size = SIZE) -> float:
    link = SHARE * each.gbits * 1e9 / 8 / LINK
    return replay(step, replace(host(each.computing, size), link=link, host_cost=host_cost), 2)


def null(step: list[Any], each: Measured) -> float:
    moved = sum(event.nbytes for event in step if isinstance(event, Issued))
    return max(each.computing, 8 * moved / (each.gbits * 1e9))


def fit(step: list[Any], steps: list[Measured]) -> float:
    """The processor's seconds a byte that are nearest to what was measured at `FITTED`."""
    fitted = [each for each in steps if each.gbits in FITTED]

    def missed(host_cost: float) -> float:
        return sum((predicted(step, each, host_cost) / each.seconds - 1) ** 2 for each in fitted)

    return min(HOST_COSTS, key=missed)


def main() -> None:
    step, steps = events(), sorted(measured(), key=lambda each: each.gbits)
    host_cost = fit(step, steps)
    rows = []
    for each in steps:
        told, plain = predicted(step, each, host_cost), null(step, each)
        errors = [f"{1e3 * value:.0f} ({value / each.seconds - 1:+.1%})" for value in (told, plain)]
        rows.append([f"{each.gbits:g}", f"{1e3 * each.seconds:.0f}", *errors, "fitted" if each.gbits in FITTED else ""])
    print(f"processor time {1e3 * host_cost * 1e6:.2f} ms a MB\n")
    print(markdown(["Gbit/s", "measured ms", "predicted", "null", ""], rows))


if __name__ == "__main__":
    main()
