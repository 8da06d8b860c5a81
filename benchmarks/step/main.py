"""Which files, functions and lines of zero3 one training step runs, beside FSDP2's: how much there is to read to follow a step.

    python benchmarks/step/main.py --help

A model of a few blocks takes some steps, until they are all alike; the next one (forward, backward, optimizer.step()) is
traced line by line. Nothing is timed. By default the process is rank 0 of 2 in torch's group of fake transfers, so the path
is the one that NCCL takes; with `--processes`, two processes on gloo. Rings of last transfers (`ZERO3_RING_DIR`) are off, unless the
environment asks for them.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

os.environ.setdefault("ZERO3_RING_DIR", "0")
sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
import zero3

BLOCKS, WIDTH = 8, 64


class Count(NamedTuple):
    functions: int
    lines: int
    calls: int
    moves: int  # calls that come from another file
    named: int  # functions but for comprehensions and lambdas, which other versions of Python run in their function's own frame


def model_of_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)))


def by_shard() -> tuple[nn.Module, list[nn.Parameter]]:
    model = model_of_blocks()
    zero3.shard(model, layers=list(model))
    return model, zero3.get_trainable_chunk(model)


def by_zero3_sequential() -> tuple[nn.Module, list[nn.Parameter]]:
    model = zero3.Zero3Sequential([zero3.Zero3Layer(block) for block in model_of_blocks()])
    return model, model.get_trainable_chunk()


def by_fsdp2() -> tuple[nn.Module, list[nn.Parameter]]:
    from torch.distributed.fsdp import fully_shard

    model = model_of_blocks()
    for block in model:
        fully_shard(block)
    return fully_shard(model), list(model.parameters())


ZERO3 = Path(zero3.__file__).parent
SYSTEMS: dict[str, tuple[Callable[[], Any], Path]] = {
    "zero3.shard": (by_shard, ZERO3),
    "Zero3Sequential": (by_zero3_sequential, ZERO3),
    "FSDP2": (by_fsdp2, Path(torch.__file__).parent / "distributed" / "fsdp"),
}


def trace(step: Callable[[], object], folder: Path) -> dict[str, Count]:
    """What `step` runs of the files in `folder`, by file."""
    functions: dict[str, set[str]] = defaultdict(set)
    lines: dict[str, set[int]] = defaultdict(set)
    calls: Counter[str] = Counter()
    moves: Counter[str] = Counter()

    def enter(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        name = frame.f_code.co_filename
        if not name.startswith(str(folder)):
            return None
        functions[name].add(frame.f_code.co_qualname)
        calls[name] += 1
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(str(folder)):
            caller = caller.f_back
        moves[name] += caller is None or caller.f_code.co_filename != name

        def inside(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
            if event == "line":
                lines[name].add(frame.f_lineno)
            return inside

        return inside

    before = sys.gettrace()  # a coverage tool's, perhaps
    threading.settrace(enter)
    sys.settrace(enter)
    try:
        step()
    finally:
        sys.settrace(before)
        threading.settrace(None)  # type: ignore[arg-type]

    def named(name: str) -> int:
        return sum(not function.endswith(">") for function in functions[name])

    return {
        str(Path(name).relative_to(folder)): Count(len(functions[name]), len(lines[name]), calls[name], moves[name], named(name))
        for name in lines
    }


def steady_step(system: str) -> dict[str, Count]:
    make, folder = SYSTEMS[system]
    model, parameters = make()
    optimizer = torch.optim.AdamW(parameters)

    def step() -> None:
        model(torch.randn(4, WIDTH)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return trace(step, folder)


def count(systems: list[str]) -> dict[str, dict[str, Count]]:
    """In this process alone, with transfers that move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        try:
            return {system: steady_step(system) for system in systems}
        finally:
            dist.destroy_process_group()


def _rank(rank: int, place: str, systems: list[str]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    found = {system: steady_step(system) for system in systems}
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        torch.save({system: {name: tuple(each) for name, each in files.items()} for system, files in found.items()}, f"{place}/found")


def count_in_processes(systems: list[str]) -> dict[str, dict[str, Count]]:
    """In two processes on gloo; those of the first."""
    with tempfile.TemporaryDirectory() as place:
        mp.spawn(_rank, args=(place, systems), nprocs=2)
        found = torch.load(f"{place}/found", weights_only=True)
    return {system: {name: Count(*each) for name, each in files.items()} for system, files in found.items()}


def show(system: str, found: dict[str, Count]) -> None:
    totals = Count(*(sum(each[column] for each in found.values()) for column in range(5)))
    print(f"{system}: {len(found)} files, {totals.functions} functions, {totals.lines} lines; {totals.calls} calls of functions")
    outside = sum(each.named for name, each in found.items() if not name.startswith("comm/"))
    print(f"    outside of comm {outside} functions with a name; calls from file to file, a layer: {totals.moves / BLOCKS:.0f}")
    for name, each in sorted(found.items(), key=lambda item: -item[1].lines):
        print(f"    {name:36} {each.functions:4} functions {each.lines:5} lines {each.calls:6} calls")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("systems", nargs="*", metavar="SYSTEM", help=f"of {', '.join(SYSTEMS)}; all, if none is named")
    parser.add_argument("--processes", action="store_true", help="two processes on gloo, in place of transfers that move nothing")
    chosen = parser.parse_args(arguments)
    if unknown := [system for system in chosen.systems if system not in SYSTEMS]:
        parser.error(f"no such system: {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    systems = chosen.systems or list(SYSTEMS)
    for system, found in (count_in_processes if chosen.processes else count)(systems).items():
        show(system, found)


if __name__ == "__main__":
    main()
