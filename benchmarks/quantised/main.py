"""Trains adapters on a Llama whose base is in four bits, on two ranks, by zero3 and by FSDP2 with bitsandbytes and torchao.

    python benchmarks/quantised/main.py --help

Every (repetition, system) is a fresh group of processes, repetitions outermost, so that a noisy machine is noisy to all. A last
group of each is counted and not timed: live bytes, collectives, and losses against one process on the dequantised base, which sees
all ranks' batches. A peer that is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
import torch.distributed as dist

from benchmarks.common.counters import LiveBytes, Resident, sent_bytes
from benchmarks.common.ranks import RanksFailed, alone, enter_private_network, on_ranks
from benchmarks.common.report import MEGABYTE, leave, markdown, median, progress, spread
from benchmarks.quantised import systems
from benchmarks.quantised.systems import SYSTEMS, Size, missing

RATE = 1e-3
TINY = Size(hidden=256, intermediate=256, layers=1, heads=1, vocabulary=8)


def _step(model: Any, size: Size, step: int, rank: int) -> float:
    ids = size.ids(step, rank)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.item())


def train(rank: int, world_size: int, system: str, size: Size, directory: str, steps: int, warmup: int) -> dict[str, Any]:
    """Loading and steps, timed."""
    _imported(system, directory)
    dist.barrier()
    resident, begin = Resident(), time.perf_counter()
    built = SYSTEMS[system][0](size, directory)
    report: dict[str, Any] = {"loading": time.perf_counter() - begin, "rss_loading": resident.peak()}
    report |= {"read": built.read() if built.read is not None else None, "rest": systems.bytes_at_rest(built.model)}
    optimizer = torch.optim.AdamW(built.trained, lr=RATE)
    rows = []
    for step in range(warmup + steps):
        dist.barrier()
        sent, begin, busy = sent_bytes("lo"), time.perf_counter(), time.process_time()
        _step(built.model, size, step, rank)
        optimizer.step()
        optimizer.zero_grad()
        end, busy = time.perf_counter(), time.process_time() - busy
        dist.barrier()
        rows.append((end - begin, busy, sent_bytes("lo") - sent))
    seconds, processor, sent_in = zip(*rows[warmup:], strict=True)
    return report | {"seconds": seconds, "processor_seconds": processor, "sent": sent_in}


def _imported(system: str, directory: str) -> None:
    """Builds a tiny model first: what imports take is not the price of loading."""
    SYSTEMS[system][0](TINY, f"{directory}/tiny")
    gc.collect()


def count(rank: int, world_size: int, system: str, size: Size, directory: str, steps: int) -> dict[str, Any]:
    """Live bytes, transfers, losses and gradients."""
    _imported(system, directory)
    transfers: Counter[str] = Counter()
    with LiveBytes() as live:
        built = SYSTEMS[system][0](size, directory)
        if SYSTEMS[system][2] == "zero3":
            _count_transfers(built.model, transfers)
        gc.collect()
        report: dict[str, Any] = {"live_rest": live.now}
        optimizer = torch.optim.SGD(built.trained, lr=RATE)  # a wrong scale of gradients would show
        losses = []
        for step in range(steps):
            live.restart()
            transfers.clear()
            losses.append(_step(built.model, size, step, rank))
            report |= {"live_peak": live.peak, "collectives": dict(live.collectives), "transfers": dict(transfers)}
            optimizer.step()
            optimizer.zero_grad()
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return report | {"losses": (total / world_size).tolist()}


def _count_transfers(model: Any, found: Counter[str]) -> None:
    """Gathers of chunks of which nothing trains, by dtype (uint8: quantised), with the bytes of their full buffers; those of adapters;
    and reductions."""
    from zero3.access import states_of
    from zero3.core.chunk import Chunk

    fetch = Chunk.start_fetch

    def counted(self: Chunk, *args: Any) -> None:
        what = "adapters" if self.shard.requires_grad else str(self.shard.dtype).removeprefix("torch.")
        found[f"gathers of {what}"] += 1
        found[f"bytes of {what}"] += self.layout.world_size * self.shard.nbytes
        fetch(self, *args)

    Chunk.start_fetch = counted  # type: ignore[method-assign]
    communicator = type(states_of(model)[0].communicator)
    for name in ("reduce_scatter", "reduce_pieces"):
        setattr(communicator, name, _counted(getattr(communicator, name), found))


def _counted(original: Any, found: Counter[str]) -> Any:
    def reduced(*args: Any, **kwargs: Any) -> Any:
        found["reductions"] += 1
        return original(*args, **kwargs)

    return reduced


def reference(size: Size, directory: str, kind: str, ranks: int, steps: int) -> list[float]:
    """Losses of one process on the dequantised base."""
    built = systems.dequantised(size, directory, kind)
    optimizer, losses = torch.optim.SGD(built.trained, lr=RATE), []
    for step in range(steps):
        found = []
        for rank in range(ranks):
            ids = size.ids(step, rank)
            loss = built.model(input_ids=ids, labels=ids).loss
            (loss / ranks).backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(found) / ranks)
    return losses


def attempt(entry: dict[str, Any], ranks: int, body: Any, *arguments: Any) -> list[dict[str, Any]]:
    """What each rank reports; [] if one fails, and then the system is not tried again."""
    try:
        return on_ranks(ranks, body, *arguments)
    except RanksFailed as error:
        progress(f"failed: {error}")
        entry["failed"] = str(error).strip().splitlines()[-1]
        return []


def measure(args: argparse.Namespace, size: Size, directory: str) -> Iterator[dict[str, dict[str, Any]]]:
    """By system: what the ranks of every repetition reported, and what was counted. After each repetition, and after each count."""
    found: dict[str, dict[str, Any]] = {system: {"runs": [], "count": [], "failed": missing(system)} for system in args.systems}
    for repetition in range(args.repetitions):
        for system, entry in found.items():
            if not entry["failed"]:
                progress(f"repetition {repetition + 1} of {args.repetitions}: {system}")
                if ranks := attempt(entry, args.ranks, train, system, size, directory, args.steps, args.warmup):
                    entry["runs"].append(ranks)
        yield found
    references: dict[str, list[float]] = {}
    for system, entry in found.items():
        kind = SYSTEMS[system][1]
        if not entry["failed"] and args.check_steps:
            progress(f"counting, and comparing losses: {system}")
            if kind not in references:
                references[kind] = alone(reference, size, directory, kind, args.ranks, args.check_steps)
            entry["reference"] = references[kind]
            entry["count"] = attempt(entry, args.ranks, count, system, size, directory, args.check_steps)
            yield found


def seconds_of(entry: dict[str, Any]) -> list[float]:
    """Of each step, the slowest rank's."""
    return [max(ranks) for run in entry["runs"] for ranks in zip(*(rank["seconds"] for rank in run), strict=True)]


def row(system: str, entry: dict[str, Any], elements: int, first: float) -> list[object]:
    runs, counted = entry["runs"], entry["count"]
    if entry["failed"] or not runs:
        return [system, entry["failed"]]
    processor = [sum(rank["processor_seconds"][step] for rank in run) for run in runs for step in range(len(run[0]["seconds"]))]
    rest = sum(rank["rest"][0] for rank in runs[0]) / elements if system != systems.ZERO3_BF16 else 2.0
    read = " / ".join(f"{rank['read'] / MEGABYTE:.1f}" for rank in runs[0]) if runs[0][0]["read"] is not None else "not counted"
    sent = [statistics.mean(run[0]["sent"]) / len(run) for run in runs]  # the loopback carries what both send
    cells: list[object] = [
        system, f"{rest:.4f}", f"{median(sent) / MEGABYTE:.1f}", spread(seconds_of(entry)), f"{median(seconds_of(entry)) / first:.2f}",
        f"{1e3 * median(processor):.0f}", f"{median([max(rank['rss_loading'] for rank in run) for run in runs]) / MEGABYTE:.0f}",
        f"{median([max(rank['loading'] for rank in run) for run in runs]):.1f}", read,
    ]  # fmt: skip
    if counted:
        apart = max(abs(mine - theirs) / theirs for mine, theirs in zip(counted[0]["losses"], entry["reference"], strict=True))
        cells += [f"{max(rank[what] for rank in counted) / MEGABYTE:.0f}" for what in ("live_rest", "live_peak")] + [f"{apart:.1e}"]
    return cells


COLUMNS = [
    "system", "byte an element, all ranks", "MB sent a step and rank", "step, ms (spread)", "ratio", "processor, ms",
    "MB grown while loading", "s loading", "MB read", "MB live at rest", "MB live, peak", "loss apart",
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Size.add_flags(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each process; default: %(default)s")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--check-steps", type=int, default=3, help="steps that are counted and compared; 0: none; default: %(default)s")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="SYSTEM", help="; ".join(SYSTEMS))
    parser.add_argument("--output", type=Path, help="a folder for the table and all that was measured")
    args = parser.parse_args()
    size = Size.from_flags(args)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if not enter_private_network():
        progress("not root: bytes on the wire are those of the whole machine's loopback, other programs included")
    model = systems.base(size, "meta")
    elements, everything = (
        sum(linear.weight.numel() for *_, linear in systems.linear_layers(model)),
        sum(p.numel() for p in model.parameters()),
    )
    title = f"{everything / 1e6:.1f} M parameters, {elements / 1e6:.1f} M in four bits, {args.ranks} ranks, "
    title += f"batch {size.batch} x {size.sequence}\n\n"
    with tempfile.TemporaryDirectory() as directory:
        systems.make_checkpoint(size, Path(directory))
        systems.make_checkpoint(TINY, Path(directory, "tiny"))
        for found in measure(args, size, directory):
            first = next((median(seconds_of(entry)) for entry in found.values() if entry["runs"]), 1.0)
            table = title + markdown(COLUMNS, [row(system, entry, elements, first) for system, entry in found.items()])
            leave(args.output, "quantised", {"size": asdict(size), "elements": elements, "systems": found}, table)
    print(table)
    sys.exit(any(entry["failed"] and not missing(system) for system, entry in found.items()))


if __name__ == "__main__":
    main()
