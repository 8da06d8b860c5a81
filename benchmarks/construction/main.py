"""Shards an initialised model under several systems, interleaved, and compares seconds, processor seconds and resident memory.

    python benchmarks/construction/main.py --help

Every (repetition, system) is a fresh group of processes, repetitions outermost, so that a noisy machine is noisy to all.
Each process does it twice: what a system loads and compiles when it is first used is in the first time only.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.common.counters import Resident
from benchmarks.common.model import Size, layers
from benchmarks.common.ranks import on_ranks
from benchmarks.common.report import MEGABYTE, leave, markdown, median, progress, spread

Report = dict[str, list[float]]  # by what was measured: the first time, and the second


def by_sequential(modules: list[nn.Module]) -> nn.Module:
    from zero3 import Zero3Layer, Zero3Sequential

    return Zero3Sequential([Zero3Layer(module) for module in modules])


def by_shard(modules: list[nn.Module]) -> nn.Module:
    import zero3

    return zero3.shard(nn.Sequential(*modules), modules)


def by_fsdp1(modules: list[nn.Module]) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(module) for module in modules})
    return FullyShardedDataParallel(nn.Sequential(*modules), auto_wrap_policy=policy, device_id=torch.device("cpu"))


def by_fsdp2(modules: list[nn.Module]) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*modules)
    for module in [*model, model]:
        fully_shard(module)
    return model


SYSTEMS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "FSDP1": by_fsdp1,
    "FSDP2": by_fsdp2,
    "zero3, Zero3Sequential": by_sequential,
    "zero3, shard": by_shard,
}


def measure(rank: int, world_size: int, system: str, size: Size) -> Report:
    for name in ("torch.distributed.fsdp", "zero3"):  # what an import takes is not what we measure
        import_module(name)
    report: Report = {"seconds": [], "processor": [], "peak": [], "left": []}
    for _ in range(2):
        modules = layers(size)
        dist.barrier()
        resident, begin, processor = Resident(), time.perf_counter(), time.process_time()
        model = SYSTEMS[system](modules)
        del modules
        report["seconds"].append(time.perf_counter() - begin)
        report["processor"].append(time.process_time() - processor)
        report["peak"].append(resident.peak() / MEGABYTE)
        resident.restart()
        report["left"].append(resident.peak() / MEGABYTE)
        del model
        dist.barrier()
    return report


def repeat(args: argparse.Namespace, size: Size) -> Iterator[dict[str, list[list[Report]]]]:
    """By system: what each rank of every repetition reported. After each repetition."""
    found: dict[str, list[list[Report]]] = {system: [] for system in args.systems}
    for repetition in range(args.repetitions):
        for system in args.systems:
            progress(f"repetition {repetition + 1} of {args.repetitions}: {system}")
            found[system].append(on_ranks(args.ranks, measure, system, size))
        yield found


def table(found: dict[str, list[list[Report]]], peer: str) -> str:
    def of(system: str, what: str, time_of: int) -> list[float]:
        """One value a repetition: of the rank that had most."""
        return [max(rank[what][time_of] for rank in ranks) for ranks in found[system]]

    rows = []
    for system in found:
        cells = []
        for time_of in (0, 1):
            for what in ("seconds", "processor"):
                own = of(system, what, time_of)
                ratio = f"{median(own) / median(of(peer, what, time_of)):.2f}" if peer in found else ""
                cells += [spread(own), ratio]
        cells += [f"{median(of(system, what, 0)):.0f}" for what in ("peak", "left")]
        rows.append([system, *cells])
    times = [f"{when}, {what}" for when in ("first time", "second time") for what in ("ms (least to most)", "processor ms")]
    columns = [column for what in times for column in (what, f"x {peer}")]
    return markdown(["system", *columns, "peak RSS above the whole model, MB", "RSS when done"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Size.add_flags(parser)
    parser.set_defaults(width=1024, depth=12, heads=16)
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS), metavar="SYSTEM", help="; ".join(SYSTEMS))
    parser.add_argument("--output", type=Path, help="a folder for the table and all that was measured")
    args = parser.parse_args()
    size = Size.from_flags(args)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    progress(f"{size.parameters / 1e6:.1f} M parameters")
    results = {"size": asdict(size), "parameters": size.parameters, "ranks": args.ranks}
    for found in repeat(args, size):
        leave(args.output, "construction", results | {"systems": found}, table(found, "FSDP2"))
    print(table(found, "FSDP2"))


if __name__ == "__main__":
    main()
