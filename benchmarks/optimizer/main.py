"""What an optimizer's step costs over chunks, and what it costs to give it whole parameters.

    python benchmarks/optimizer/main.py --help

Both systems, and all ways, run in turns in the same processes, so that a noisy machine is noisy to all.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero3
from benchmarks.common.counters import send_by_sockets, sent_bytes
from benchmarks.common.model import Size, batch, layers, loss_of
from benchmarks.common.ranks import on_ranks
from benchmarks.common.report import MEGABYTE, markdown, write
from zero3.comm.communicator import Communicator
from zero3.comm.factory import communicator_for
from zero3.core.layout import ChunkLayout
from zero3.optim import cuts


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
        loss_of(model, ids, labels).backward()
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
    owners = iter(cuts.deal([torch.Size(shape).numel() for layer in named for _, shape in layer], world_size))
    return [cuts.dealt(layer, [next(owners) for _ in layer], world_size) for layer in named]


def padded(size: Size, world_size: int) -> list[int]:
    """The lengths of full buffers whose even cuts hold each parameter on one rank: each rank has room for the fullest."""
    lengths = []
    for layer in shapes(size):
        numels = [torch.Size(shape).numel() for _, shape in layer]
        owners = cuts.deal(numels, world_size)
        lengths.append(world_size * max(sum(n for n, owner in zip(numels, owners, strict=True) if owner == r) for r in range(world_size)))
    return lengths


def travel(communicator: Communicator, lengths: list[int], bounds: list[tuple[int, ...] | None], kept: dict[str, Any]) -> None:
    """The transfers of one step: each layer is gathered twice (the last once) and its gradient reduced."""
    for index, (length, cut_at) in enumerate(zip(lengths, bounds, strict=True)):
        full, gradient = kept[f"full {length}"], kept[f"gradient {length}"]
        rank, world_size = communicator.rank, communicator.world_size
        place = (
            slice(cut_at[rank], cut_at[rank + 1]) if cut_at else slice(rank * (length // world_size), (rank + 1) * (length // world_size))
        )
        for _ in range(1 if index == len(lengths) - 1 else 2):
            communicator.all_gather(full, full[place], cut_at).wait()
        communicator.reduce_scatter(kept["landing"][: place.stop - place.start], gradient, cut_at).wait()


def around(numels: list[int], world_size: int, rank: int, slices: dict[int, Tensor], wholes: dict[int, Tensor]) -> None:
    """Even cuts stay: slices of gradients go to the owners before the step, of parameters back after it. (One message a parameter.)"""
    owners = cuts.deal(numels, world_size)
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
    owners = cuts.deal(numels, world_size)
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


def one_rank(rank: int, world_size: int, size: Size, repetitions: int) -> dict[str, dict[str, Any]]:
    send_by_sockets()
    actions = {**actions_of_a_step(size, rank), **ways_of_whole(size, rank, world_size)}
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "wire": []} for name in actions}
    for repetition in range(repetitions + 1):
        turns = list(actions.items())
        random.Random(repetition).shuffle(turns)  # the same order on all ranks; what runs before one leaves caches and pages to it
        for name, action in turns:
            before = sent_bytes("lo")
            seconds = timed(action)
            if repetition:  # the first is to warm up
                found[name]["seconds"].append(seconds)
                found[name]["wire"].append((sent_bytes("lo") - before) / world_size)
    return found


def padding_of(size: Size, world_sizes: list[int]) -> dict[int, tuple[float, float]]:
    """By world size: what padding adds to a model whose even cuts hold parameters whole; the fullest rank of uneven cuts by the mean."""
    total = sum(torch.Size(shape).numel() for layer in shapes(size) for _, shape in layer)
    found = {}
    for world_size in world_sizes:
        dealt = uneven(size, world_size)
        fullest = max(sum(layout.chunk_numel(rank) for layout in dealt) for rank in range(world_size))
        found[world_size] = sum(padded(size, world_size)) / total - 1, fullest * world_size / total
    return found


def time_table(times: dict[str, dict[str, Any]]) -> str:
    rows = []
    first: dict[str, float] = {}
    for name, found in times.items():
        least = min(found["seconds"])
        ratio = least / first.setdefault(name.split()[0].replace("uneven", "even"), least)
        others = f"{statistics.median(found['seconds']) * 1e3:.0f} ({max(found['seconds']) * 1e3:.0f})"
        rows.append([name, f"{least * 1e3:.1f}", others, f"{ratio:.2f}", f"{min(found['wire']) / MEGABYTE:.1f}"])
    return markdown(["what", "least ms", "median (most)", "least, x the first of its kind", "wire MB a rank"], rows)


def padding_table(found: dict[int, tuple[float, float]]) -> str:
    rows = [[ranks, f"{padding:.0%}", f"{fullest:.2f}"] for ranks, (padding, fullest) in found.items()]
    return markdown(["ranks", "padding of even cuts that hold parameters whole", "fullest rank of uneven cuts, x the mean"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    Size.add_flags(parser)
    parser.add_argument("--ranks", type=int, default=2, help="processes; default: %(default)s")
    parser.add_argument("--repetitions", type=int, default=25, help="of each action, in turns; default: %(default)s")
    parser.add_argument("--padding-ranks", type=int, nargs="+", default=[2, 8, 64], help="world sizes to compute padding for")
    parser.add_argument("--output", type=Path, help="a folder for the tables and all that was measured")
    args = parser.parse_args()
    size = Size.from_flags(args)
    times = on_ranks(args.ranks, one_rank, size, args.repetitions)[0]
    padding = padding_of(size, args.padding_ranks)
    tables = f"{time_table(times)}\n\n{padding_table(padding)}"
    write(args.output, "optimizer", {"arguments": vars(args) | {"output": str(args.output)}, "times": times, "padding": padding}, tables)


if __name__ == "__main__":
    main()
