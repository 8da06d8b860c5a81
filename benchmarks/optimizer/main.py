"""What an optimizer's step costs over chunks, and what it costs to give it whole parameters.

    python benchmarks/optimizer/main.py --help

Both systems, and all ways, run in turns in the same processes, so that a noisy machine is noisy to all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import zero3
from zero3.collectives import Communicator, communicator_for
from zero3.layout import ChunkLayout, deal

sys.path.insert(0, str(Path(__file__).parent.parent / "peers"))
from model import Size, batch, layers

MEGABYTE = 2**20


def sent_bytes() -> int:
    """What this machine's loopback has sent so far, all ranks together."""
    lines = [line.split() for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(lines[0][9]) if lines else 0


def timed(action: Callable[[], object]) -> float:
    dist.barrier()
    begin = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - begin


# -- (a) the step and the clipping, beside FSDP2


def fsdp2(size: Size) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*layers(size))
    for module in model:
        fully_shard(module)
    fully_shard(model)
    return model


def actions_of_a_step(size: Size, rank: int) -> dict[str, Callable[[], object]]:
    """Each works on gradients that stay as they are, but for the clipping's factor of 1."""
    ours, theirs = zero3.Zero3Sequential([zero3.Zero3Layer(module) for module in layers(size)]), fsdp2(size)
    parts = zero3.Zero3Sequential([zero3.Zero3Layer(module) for module in layers(size)])
    groups = zero3.param_groups(parts, lambda name, info: {"weight_decay": 0.1 if info.ndim > 1 else 0.0})
    ids, labels = batch(size, 0, rank)
    for model in (ours, theirs, parts):
        nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten()).backward()
    optimizers = [torch.optim.AdamW(p, lr=1e-6, foreach=True) for p in (ours.get_trainable_chunk(), groups, theirs.parameters())]
    return {
        "AdamW over chunks": optimizers[0].step,
        "AdamW over parts, two groups": optimizers[1].step,
        "AdamW over FSDP2's parameters": optimizers[2].step,
        "clip_grad_norm_ over chunks": lambda: zero3.clip_grad_norm_(ours, 1e9),
        "clip_grad_norm_ over parts": lambda: zero3.clip_grad_norm_(parts, 1e9),
        "clip_grad_norm_ over FSDP2's parameters": lambda: torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e9),
    }


# -- (b) whole parameters, three ways


def shapes(size: Size) -> list[list[tuple[str, tuple[int, ...]]]]:
    return [[(name, tuple(p.shape)) for name, p in module.named_parameters()] for module in layers(size)]


def uneven(size: Size, world_size: int) -> list[ChunkLayout]:
    """The library's: cuts at the edges of parameters, owners balanced over the model."""
    named = shapes(size)
    owners = iter(deal([torch.Size(shape).numel() for layer in named for _, shape in layer], world_size))
    return [ChunkLayout.dealt(layer, [next(owners) for _ in layer], world_size) for layer in named]


def padded(size: Size, world_size: int) -> list[int]:
    """The lengths of full buffers whose even cuts hold each parameter on one rank: each rank has room for the fullest."""
    lengths = []
    for layer in shapes(size):
        numels = [torch.Size(shape).numel() for _, shape in layer]
        owners = deal(numels, world_size)
        lengths.append(world_size * max(sum(n for n, owner in zip(numels, owners, strict=True) if owner == r) for r in range(world_size)))
    return lengths


def travel(communicator: Communicator, lengths: list[int], bounds: list[tuple[int, ...] | None], kept: dict[str, Any]) -> None:
    """The transfers of one step: each layer is gathered twice (the last once) and its gradient reduced."""
    for index, (length, cuts) in enumerate(zip(lengths, bounds, strict=True)):
        full, gradient = kept[f"full {length}"], kept[f"gradient {length}"]
        rank, world_size = communicator.rank, communicator.world_size
        place = slice(cuts[rank], cuts[rank + 1]) if cuts else slice(rank * (length // world_size), (rank + 1) * (length // world_size))
        for _ in range(1 if index == len(lengths) - 1 else 2):
            communicator.all_gather(full, full[place], cuts).wait()
        communicator.reduce_scatter(kept["landing"][: place.stop - place.start], gradient, cuts).wait()


def around(numels: list[int], world_size: int, rank: int, slices: dict[int, Tensor], wholes: dict[int, Tensor]) -> None:
    """Even cuts stay: slices of gradients go to the owners before the step, of parameters back after it. (One message a parameter.)"""
    owners = deal(numels, world_size)
    for _there in (True, False):
        works = []
        for number, (numel, owner) in enumerate(zip(numels, owners, strict=True)):
            part = -(-numel // world_size)
            for other in range(world_size):
                low, high = min(numel, other * part), min(numel, (other + 1) * part)
                if other == owner or low == high or rank not in (other, owner):
                    continue
                mine = wholes[number][low:high] if rank == owner else slices[number][: high - low]
                sends = (rank == other) == _there
                works.append((dist.isend if sends else dist.irecv)(mine, other if rank == owner else owner))
        for work in works:
            work.wait()


def ways_of_whole(size: Size, rank: int, world_size: int) -> dict[str, Callable[[], object]]:
    communicator = communicator_for(None, torch.device("cpu"))
    dealt, wide = uneven(size, world_size), padded(size, world_size)
    even = [ChunkLayout.build(layer, world_size).padded_numel for layer in shapes(size)]
    numels = [torch.Size(shape).numel() for layer in shapes(size) for _, shape in layer if len(shape) == 2]
    kept: dict[str, Any] = {"landing": torch.zeros(max(*even, *wide))}
    for length in {*even, *wide, *(layout.numel for layout in dealt)}:
        kept[f"full {length}"], kept[f"gradient {length}"] = torch.zeros(length), torch.zeros(length)
    owners = deal(numels, world_size)
    slices = {number: torch.zeros(-(-numel // world_size)) for number, numel in enumerate(numels)}
    wholes = {number: torch.zeros(numel) for number, numel in enumerate(numels) if owners[number] == rank}
    nothing = [None] * len(even)
    return {
        "even cuts (no whole parameters)": lambda: travel(communicator, even, nothing, kept),
        "uneven cuts (built)": lambda: travel(communicator, [x.numel for x in dealt], [x.bounds for x in dealt], kept),
        "even cuts, padded": lambda: travel(communicator, wide, nothing, kept),
        "even cuts, moved around the step": lambda: (
            travel(communicator, even, nothing, kept),
            around(numels, world_size, rank, slices, wholes),
        ),
    }


def one_rank(rank: int, world_size: int, rendezvous: str, size: Size, args: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size, timeout=timedelta(seconds=300))
    actions = {**actions_of_a_step(size, rank), **ways_of_whole(size, rank, world_size)}
    times: dict[str, list[float]] = {name: [] for name in actions}
    wire: dict[str, float] = {}
    for repetition in range(args.repetitions + 1):
        turns = list(actions.items())
        random.Random(repetition).shuffle(turns)  # the same order on all ranks; what runs before one leaves caches and pages to it
        for name, action in turns:
            before = sent_bytes()
            seconds = timed(action)
            wire[name] = min(wire.get(name, float("inf")), (sent_bytes() - before) / world_size)  # others use the loopback too
            if repetition:  # the first is to warm up
                times[name].append(seconds)
    if rank == 0:
        results.put({"times": times, "wire": wire})
    dist.barrier()
    dist.destroy_process_group()


def padding_table(size: Size, world_sizes: list[int]) -> str:
    total = sum(torch.Size(shape).numel() for layer in shapes(size) for _, shape in layer)
    rows = ["| ranks | padding of even cuts that hold parameters whole | fullest rank of uneven cuts, x the mean |", "|---|---|---|"]
    for world_size in world_sizes:
        dealt = uneven(size, world_size)
        fullest = max(sum(layout.chunk_numel(rank) for layout in dealt) for rank in range(world_size))
        rows.append(f"| {world_size} | {sum(padded(size, world_size)) / total - 1:.0%} | {fullest * world_size / total:.2f} |")
    return "\n".join(rows)


def time_table(report: dict[str, Any]) -> str:
    rows = ["| what | least ms | median (most) | least, x the first of its kind | wire MB a rank |", "|---|---|---|---|---|"]
    first: dict[str, float] = {}
    for name, seconds in report["times"].items():
        least = min(seconds)
        ratio = least / first.setdefault(name.split()[0].replace("uneven", "even"), least)
        others = f"{statistics.median(seconds) * 1e3:.0f} ({max(seconds) * 1e3:.0f})"
        rows.append(f"| {name} | {least * 1e3:.1f} | {others} | {ratio:.2f} | {report['wire'][name] / MEGABYTE:.1f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Size):
        parser.add_argument(f"--{field.name}", type=int, default=field.default, help=f"of the model (default: {field.default})")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--repetitions", type=int, default=15, help="of each action, in turns (default: 15)")
    parser.add_argument("--padding-ranks", type=int, nargs="+", default=[2, 8, 64], help="world sizes to compute padding for")
    parser.add_argument("--output", type=Path, help="a JSON file for all that was measured")
    args = parser.parse_args()
    size = Size(**{field.name: getattr(args, field.name) for field in fields(Size)})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        arguments = (args.ranks, f"{directory}/rendezvous", size, args, results)
        mp.start_processes(one_rank, arguments, nprocs=args.ranks, start_method="spawn")
    report = results.get()
    print(time_table(report), padding_table(size, args.padding_ranks), sep="\n\n")
    if args.output:
        args.output.write_text(json.dumps({"torch": torch.__version__, **report}, indent=1))


if __name__ == "__main__":
    main()
