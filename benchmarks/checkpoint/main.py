"""Saves and loads one training state under several systems, interleaved: seconds, bytes written and read, peak host memory.

    python benchmarks/checkpoint/main.py --help

Every (repetition, system) is a fresh group of processes, repetitions outermost, so that a noisy machine is noisy to all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere
import zero3

MEGABYTE = 2**20
WIDTH = 2048


class Run(NamedTuple):
    """A system's model and optimizer on this rank, and its way to save them and to load them."""

    save: Callable[[str], object]
    load: Callable[[str], object]
    probe: Callable[[], float]


def build(layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def fill(optimizer: torch.optim.Optimizer, seed: int) -> None:
    """The state that a step would leave, without the step."""
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moments = {
                key: torch.empty_like(parameter).fill_(torch.rand((), generator=generator).item()) for key in ("exp_avg", "exp_avg_sq")
            }
            optimizer.state[parameter] = {"step": torch.tensor(5.0), **moments}


def first_moment(optimizer: torch.optim.Optimizer) -> float:
    state = next(iter(optimizer.state.values()))["exp_avg"]
    return (state.to_local() if hasattr(state, "to_local") else state).flatten()[0].item()


def by_zero3(layers: int, seed: int) -> Run:
    model = zero3.Zero3Sequential([zero3.Zero3Layer(layer) for layer in build(layers)])
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))
    if seed:
        fill(optimizer, seed)
    return Run(
        lambda path: zero3.save_checkpoint(path, model, optimizer),
        lambda path: zero3.load_checkpoint(path, model, optimizer),
        lambda: first_moment(optimizer),
    )


def sharded(layers: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(layers)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    if seed:
        fill(optimizer, seed)
    return model, optimizer


def by_dcp(layers: int, seed: int) -> Run:
    """torch.distributed.checkpoint: every rank writes its shards. No hashes."""
    model, optimizer = sharded(layers, seed)

    def save(path: str) -> None:
        state, moments = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=path)

    def load(path: str) -> None:
        state, moments = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": moments}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)

    return Run(save, load, lambda: first_moment(optimizer))


def by_gathering(layers: int, seed: int) -> Run:
    """Everything to rank 0, which calls torch.save; to load, every rank maps the file and takes its shards."""
    model, optimizer = sharded(layers, seed)
    everything = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save(path: str) -> None:
        state, moments = get_state_dict(model, optimizer, options=everything)
        if dist.get_rank() == 0:
            Path(path).mkdir()
            with open(f"{path}/all.pt", "wb") as file:
                torch.save({"model": state, "optimizer": moments}, file)
                os.fsync(file.fileno())
        dist.barrier()

    def load(path: str) -> None:
        loaded = torch.load(f"{path}/all.pt", mmap=True, weights_only=True)
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"], options=options)

    return Run(save, load, lambda: first_moment(optimizer))


SYSTEMS: dict[str, Callable[[int, int], Run]] = {
    "zero3.save_checkpoint": by_zero3,
    "FSDP2, torch.distributed.checkpoint": by_dcp,
    "FSDP2, gathered to rank 0, torch.save": by_gathering,
}


def status(which: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))


def io(which: str) -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if line.startswith(which))


def measure(work: Callable[[], object]) -> dict[str, float]:
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    resident, written, read = status("VmRSS"), io("wchar"), io("rchar")
    start, processor = time.perf_counter(), time.process_time()
    work()
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    dist.barrier()
    return {
        "seconds": seconds,
        "processor": processor,
        "peak": status("VmHWM") - resident,
        "written": io("wchar") - written,
        "read": io("rchar") - read,
    }


def process(rank: int, system: str, options: argparse.Namespace, directory: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    group = {"init_method": f"file://{directory}/rendezvous", "rank": rank, "world_size": options.ranks}
    dist.init_process_group("gloo", **group, timeout=timedelta(minutes=10))
    torch.manual_seed(1)
    small = SYSTEMS[system](2, seed=1)  # what torch imports late is no part of it
    small.save(f"{directory}/small")
    small.load(f"{directory}/small")
    del small
    run = SYSTEMS[system](options.layers, seed=2)
    expected = run.probe()
    found = {"save": measure(lambda: run.save(f"{directory}/checkpoint"))}
    del run
    run = SYSTEMS[system](options.layers, seed=0)
    found["load"] = measure(lambda: run.load(f"{directory}/checkpoint"))
    if run.probe() != expected:
        raise RuntimeError(f"{system} loaded {run.probe()}, expected {expected}")
    Path(f"{directory}/{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def once(system: str, options: argparse.Namespace) -> list[dict[str, dict[str, float]]]:
    directory = tempfile.mkdtemp(dir=options.directory)
    try:
        mp.spawn(process, (system, options, directory), nprocs=options.ranks)
        return [json.loads(Path(f"{directory}/{rank}.json").read_text()) for rank in range(options.ranks)]
    finally:
        shutil.rmtree(directory)
        os.sync()  # what one has written is not the next one's to wait for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=64, help=f"of {WIDTH} x {WIDTH} fp32: 16 MB each, and twice that in AdamW's state")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--only", choices=SYSTEMS, help="measure one system alone")
    parser.add_argument("--directory", help="on the disk to measure (default: the system's temporary one)")
    options = parser.parse_args()
    systems = [options.only] if options.only else list(SYSTEMS)
    results: dict[str, list[list[dict[str, dict[str, float]]]]] = {system: [] for system in systems}
    for repetition in range(options.repetitions):
        for system in systems:
            results[system].append(once(system, options))
            print(f"{repetition} {system}: {json.dumps(results[system][-1])}", flush=True)
    size = options.layers * WIDTH * WIDTH * 4 / MEGABYTE
    print(f"\n{size:.0f} MB of parameters and {2 * size:.0f} MB of AdamW's state, {options.ranks} ranks, {options.repetitions} repetitions")
    print("| system | | seconds (spread) | processor s of all | written MB | read MB | peak MB of each rank above its start |")
    print("|---|---|---|---|---|---|---|")
    for system, runs in results.items():
        for what in ("save", "load"):
            print(row(system, what, [[rank[what] for rank in run] for run in runs]))


def row(system: str, what: str, runs: list[list[dict[str, float]]]) -> str:
    def median(key: str, of: Callable[[Any], float]) -> float:
        return statistics.median(of([rank[key] for rank in run]) for run in runs)

    seconds = [max(rank["seconds"] for rank in run) for run in runs]
    spread = f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"
    peaks = " / ".join(f"{statistics.median(run[rank]['peak'] for run in runs) / MEGABYTE:.0f}" for rank in range(len(runs[0])))
    written, read = median("written", sum) / MEGABYTE, median("read", sum) / MEGABYTE
    return f"| {system} | {what} | {spread} | {median('processor', sum):.2f} | {written:.0f} | {read:.0f} | {peaks} |"


if __name__ == "__main__":
    main()
