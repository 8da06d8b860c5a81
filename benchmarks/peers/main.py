"""Trains one transformer under every system, interleaved, and compares time, memory, traffic and losses.

    python benchmarks/peers/main.py --help

Every (repetition, system) is a fresh group of processes, repetitions outermost, so that a noisy machine is noisy to all.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from model import Size, batch
from systems import SYSTEMS


def sent_bytes() -> int:
    """What this machine's loopback has sent so far, all ranks together."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split()[9])
    return 0


def is_plain(value: object) -> bool:
    return isinstance(value, torch.Tensor) and type(value).__name__ != "DTensor"  # whose local tensor is counted


def live_bytes() -> int:
    """Bytes of all live tensors' storages, each once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in gc.get_objects() if is_plain(t)}
    return sum(storages.values())


def peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one_rank(rank: int, world_size: int, rendezvous: str, system: str, size: Size, steps: int, warmup: int, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=300))
    start_rss = peak_rss()
    begin = time.perf_counter()
    model, optimizer = SYSTEMS[system](size)
    construction = time.perf_counter() - begin
    built_rss = peak_rss()
    times, losses, wire = [], [], 0
    for step in range(warmup + steps):
        ids, labels = batch(size, step, rank)
        dist.barrier()
        wire_before, begin = sent_bytes(), time.perf_counter()
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        times.append(time.perf_counter() - begin)
        wire = sent_bytes() - wire_before
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world_size)
    report = {
        "seconds": times[warmup:], "losses": losses, "construction": construction, "live": live_bytes(),
        "rss_construction": built_rss - start_rss, "rss_step": peak_rss() - start_rss, "wire": wire / world_size,
    }  # fmt: skip
    results.put((rank, report))
    dist.barrier()
    dist.destroy_process_group()


def run(system: str, size: Size, args: argparse.Namespace) -> dict[str, Any]:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        parameters = (args.ranks, f"{directory}/rendezvous", system, size, args.steps, args.warmup, results)
        mp.start_processes(one_rank, parameters, nprocs=args.ranks, start_method="spawn")
    return dict(results.get() for _ in range(args.ranks))[0]


def table(reports: dict[str, list[dict[str, Any]]]) -> str:
    """A markdown table; times are medians over repetitions and steps."""

    def median(system: str) -> float:
        return statistics.median(second for report in reports[system] for second in report["seconds"])

    megabyte = 2**20
    reference = max(reports, key=lambda system: system == "DDP")
    columns = ["system", "ms a step (spread)", "x DDP", "x FSDP2", "live MB after a step", "peak RSS MB", "wire MB a step and rank"]
    columns.append("largest difference of loss to DDP")
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for system, repetitions in reports.items():
        every = [second for report in repetitions for second in report["seconds"]]
        ratios = [f"{median(system) / median(other):.2f}" if other in reports else "" for other in ("DDP", "FSDP2")]
        loss = max(abs(a - b) for a, b in zip(repetitions[0]["losses"], reports[reference][0]["losses"], strict=True))
        last = repetitions[-1]
        rows.append(
            f"| {system} | {median(system) * 1e3:.0f} ({min(every) * 1e3:.0f} to {max(every) * 1e3:.0f}) | {ratios[0]} | {ratios[1]} | "
            f"{last['live'] / megabyte:.0f} | {last['rss_step'] / megabyte:.0f} | {last['wire'] / megabyte:.1f} | {loss:.1e} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help="measured steps in each repetition")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="SYSTEM", help=", ".join(SYSTEMS))
    parser.add_argument("--output", type=Path, help="a JSON file for all that was measured")
    args = parser.parse_args()
    size = Size(**{field.name: getattr(args, field.name) for field in fields(Size)})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    reports: dict[str, list[dict[str, Any]]] = {system: [] for system in args.systems}
    for repetition in range(args.repetitions):
        for system in args.systems:
            print(f"repetition {repetition + 1} of {args.repetitions}: {system}", file=sys.stderr, flush=True)
            reports[system].append(run(system, size, args))
    print(table(reports))
    if args.output:
        everything = {"torch": torch.__version__, "size": asdict(size), "ranks": args.ranks, "reports": reports}
        args.output.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
