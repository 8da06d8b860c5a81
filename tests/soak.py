"""Trains for a long time while faults are injected, beside the same run undisturbed. `make soak MINUTES=30`

Two processes on gloo train; beside them two others on the same data. In the first run, at random, a rank raises, runs out of
memory or gets nan; all ranks do, or are interrupted; transfers, clipping, the optimizer and saves fail. What failed is run
again. The losses have to be the same bits in both runs; memory, descriptors, threads and groups may not grow: else it exits with 1.
Then runs that are killed, stuck, out of disk or find a damaged checkpoint are started again (soak_nights).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import platform
import random
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.soak_faults import FAULTS, MICRO_BATCH, STEP, TRANSFERS, Lost, failing_save, failing_step, run_micro_batch, trap
from tests.support.soak_nights import nights
from zero3.comm.gloo import GlooCommunicator

WIDTH, DEPTH, MICRO_BATCHES = 64, 6, 2
PER_MICRO_BATCH, PER_STEP = 0.25, 0.1  # faults
WARM = 0.1  # of the run: by then allocators have what they need
# Growth after that; of everything else none. What is under way at once depends on how far ranks are apart.
ALLOWED = {"resident kB": 4000, "heap kB": 1000, "objects": 100, "kB for other ranks": 200}


class Trainer:
    """One rank of one run. `dice` fall alike on all ranks."""

    def __init__(self, rank: Rank, seed: int | None) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH)]
        self.model = zero3.Zero3Sequential([zero3.Zero3Layer(block) for block in blocks])
        self.optimizer = torch.optim.AdamW(self.model.get_trainable_chunk(), lr=1e-3)
        self.rank, self.dice, self.disturbed = rank, random.Random(seed), seed is not None
        self.losses, self.counts, self.again = array("d"), Counter[str](), 0

    def step(self) -> None:
        number = len(self.losses)
        disturbed = self.disturbed and number > 0  # the first step teaches the ranks what they do
        for micro_batch in range(MICRO_BATCHES):
            seed = 1000 * number + 10 * micro_batch + self.rank.number
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
            while (loss := self._micro_batch(x, self._draw(tuple(MICRO_BATCH), PER_MICRO_BATCH) if disturbed else None)) is None:
                self.again += 1
        self._update(self._draw(STEP, PER_STEP) if disturbed else None)
        self.losses.append(loss)

    def _draw(self, kinds: tuple[str, ...], chance: float) -> str | None:
        return self.dice.choice(kinds) if self.dice.random() < chance else None

    def _micro_batch(self, x: Tensor, kind: str | None) -> float | None:
        """Its loss, if it went well."""
        unlucky, where, number = self.dice.randrange(self.rank.world_size), self.dice.randrange(DEPTH), self.dice.randrange(TRANSFERS)
        one_rank, error = MICRO_BATCH[kind] if kind is not None else (True, Lost)
        mine = kind if not one_rank or unlucky == self.rank.number else None
        loss, passed = None, False
        with self._injected(kind):
            try:
                with zero3.step_guard(self.model) as guarded:
                    loss = run_micro_batch(self.model, x, mine, where, number, MICRO_BATCHES)
            except error as caught:  # nobody could be told in a guard, so all ranks are here
                if "injected" not in str(caught):
                    raise
                passed = True
            expected = [] if kind is None or passed else [unlucky] if one_rank else list(range(self.rank.world_size))
            passes = kind is not None and ("transfer" in kind or "interrupt" in kind)
            if passed != passes or (not passed and list(guarded.errors) != expected):
                raise RuntimeError(f"{kind}: passed {passed}, {guarded.errors} instead of {expected}")
        return None if passed or guarded.failed else loss

    def _update(self, kind: str | None) -> None:
        """Clip, step, zero; or what fails of it, and then again."""
        with self._injected(kind):
            if kind == STEP[0]:
                with trap(GlooCommunicator, "all_reduce", 0, Lost("injected")), _raising(Lost):
                    zero3.clip_grad_norm_(self.model, 1.0)
            zero3.clip_grad_norm_(self.model, 1.0)
            if kind in STEP[1:3]:
                self._failing_step(kind)
            else:
                self.optimizer.step()
            self.optimizer.zero_grad()
            if kind == STEP[3]:
                self._failing_save()

    def _failing_step(self, kind: str) -> None:
        """On one rank alone. Stepping is a rank's own business: what did not begin can begin again. What stopped half way is loaded."""
        unlucky = self.dice.randrange(self.rank.world_size)
        mine = kind if unlucky == self.rank.number else None
        half_way, path = kind == "the optimizer, half way", self.rank.scratch / "before"
        if half_way:
            zero3.save_checkpoint(path, self.model, self.optimizer)
        with _raising(Lost) if mine else contextlib.nullcontext(), failing_step(self.optimizer, mine):
            self.optimizer.step()
        if half_way:
            zero3.load_checkpoint(path, self.model, self.optimizer)
        if half_way or mine:
            self.optimizer.step()

    def _failing_save(self) -> None:
        """A rank's disk is full. The next save is whole: it brings back a model whose values are gone."""
        path, unlucky, number = self.rank.scratch / "again", self.dice.randrange(self.rank.world_size), self.dice.randrange(2)
        with _raising(OSError), failing_save(number) if unlucky == self.rank.number else contextlib.nullcontext():
            zero3.save_checkpoint(path, self.model, self.optimizer)
        zero3.save_checkpoint(path, self.model, self.optimizer, extra={"step": len(self.losses)})
        with torch.no_grad():
            for chunk in self.model.get_trainable_chunk():
                chunk.zero_()
        self.optimizer.state.clear()
        if zero3.load_checkpoint(path, self.model, self.optimizer) != {"step": len(self.losses)}:
            raise RuntimeError("another checkpoint")

    @contextlib.contextmanager
    def _injected(self, kind: str | None) -> Iterator[None]:
        """Counts it, and that it was survived."""
        self.counts[f"injected: {kind}"] += kind is not None
        yield
        self.counts[f"survived: {kind}"] += kind is not None


@contextlib.contextmanager
def _raising(error: type[BaseException]) -> Iterator[None]:
    try:
        yield
    except error as caught:
        if "injected" not in str(caught):
            raise
    else:
        raise RuntimeError(f"nothing raised {error.__name__}")


def train(rank: Rank, seed: int | None, seconds: float, steps: int = 0, shows: bool = False) -> dict[str, Any]:
    """`steps` steps, or as many as go into `seconds`; with a seed, faults. What came of it."""
    logging.getLogger("zero3").setLevel(logging.ERROR)  # a line for each fault, on each rank
    trainer, began, until = Trainer(rank, seed), time.monotonic(), torch.zeros(1)
    warm, shown = None, 0.0
    while True:
        trainer.step()
        part = len(trainer.losses) / steps if steps else (time.monotonic() - began) / seconds
        dist.all_reduce(until.fill_(part), op=dist.ReduceOp.MAX)
        part = until.item()
        if warm is None and part > WARM:
            warm = used()
        if shows and rank.number == 0 and time.monotonic() - shown > 10:
            shown = time.monotonic()
            faults = sum(count for name, count in trainer.counts.items() if name.startswith("survived"))
            print(f"{part:5.1%}: {len(trainer.losses)} steps, {faults} faults survived, {resident()} kB", file=sys.stderr, flush=True)
        if part >= 1:
            break
    usage = {"warm": warm, "end": used()}
    took = time.monotonic() - began
    return {"losses": trainer.losses, "counts": dict(trainer.counts), "again": trainer.again, "usage": usage, "seconds": took}


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "e", "f", "g", "in_use", "h", "i")]  # as mallinfo(3) has them


def resident() -> int:
    """kB."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def _target(link: os.DirEntry[str]) -> str:
    try:
        return os.readlink(link)
    except FileNotFoundError:  # the listing's own, closed by now
        return ""


def used() -> dict[str, int]:
    gc.collect()
    shared = [os.fstat(int(each.name)) for each in os.scandir("/proc/self/fd") if "memfd:zero3" in _target(each)]
    found = {
        "resident kB": resident(),
        "objects": len(gc.get_objects()),
        "tensors": sum(issubclass(type(each), Tensor) for each in gc.get_objects()),
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "Python threads": threading.active_count(),
        "kB for other ranks": sum({file.st_ino: file.st_blocks for file in shared}.values()) // 2,
        "process groups": len(dist.distributed_c10d._world.pg_map),
    }
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallinfo2"):  # glibc: what was asked for and not given back, whatever pages it lies in
        libc.mallinfo2.restype = _Mallinfo
        found["heap kB"] = libc.mallinfo2().in_use // 1024
    return found


def grown(usage: dict[str, dict[str, int]]) -> list[str]:
    """What a run has more of at its end than when it was warm."""
    warm, end = usage["warm"], usage["end"]
    return [name for name in warm if end[name] > warm[name] + ALLOWED.get(name, 0)]


def verdict(disturbed: list[dict[str, Any]], calm: list[dict[str, Any]]) -> tuple[str, bool]:
    """A report in markdown, and whether all is well. Of each run one entry a rank."""
    first, counts = disturbed[0], disturbed[0]["counts"]
    lines = ["| fault | injected | survived |", "|---|---|---|"]
    injected, survived = ([counts.get(f"{what}: {kind}", 0) for kind in FAULTS] for what in ("injected", "survived"))
    lines += [f"| {kind} | {mine} | {theirs} |" for kind, mine, theirs in zip(FAULTS, injected, survived, strict=True)]
    lines += [f"| together | {sum(injected)} | {sum(survived)} |", ""]
    steps = min(len(first["losses"]), len(calm[0]["losses"]))
    losses = [(mine["losses"], theirs["losses"]) for mine, theirs in zip(disturbed, calm, strict=True)]
    lost = [sum(mine != theirs for mine, theirs in zip(*both, strict=False)) for both in losses]
    lines += [
        f"{len(first['losses'])} steps in {first['seconds']:.0f} s; {first['again']} micro-batches were dropped and run again, "
        f"{max(lost)} steps lost: the losses of {steps - max(lost)} of {steps} steps are the same bits as in the undisturbed run beside it "
        f"({len(calm[0]['losses'])} steps).",
        "",
        "| a process | disturbed: warm | at the end | undisturbed: warm | at the end |",
        "|---|---|---|---|---|",
    ]
    for name in first["usage"]["end"]:
        cells = [str(run[0]["usage"][when][name]) for run in (disturbed, calm) for when in ("warm", "end")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    leaks = {f"rank {number}: {name}" for run in (disturbed, calm) for number, rank in enumerate(run) for name in grown(rank["usage"])}
    if leaks:
        lines += ["", f"Grown: {', '.join(sorted(leaks))}."]
    return "\n".join(lines), not leaks and not any(lost) and injected == survived and steps > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float, nargs="?", default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--nights", type=float, metavar="MINUTES", help="for the runs that are started again (default: a third of the others)"
    )
    parser.add_argument("--output", type=Path, help="where the report goes, as markdown; it is printed in any case")
    given = parser.parse_args()
    # torch keeps a record of the last 2000 collectives, for its own debugging: 2 MB that would come slowly
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    seconds = 60 * given.minutes
    options = {"group_timeout": 120.0, "join_timeout": 2 * seconds + 300, "debug": "OFF"}
    with ThreadPoolExecutor() as runs:
        calm = runs.submit(on_ranks, 2, train, None, seconds, **options)
        disturbed = on_ranks(2, train, given.seed, seconds, 0, True, **options)
    report, well = verdict(disturbed, calm.result())
    restarts, restarted = nights(seconds / 3 if given.nights is None else 60 * given.nights, given.seed)
    report, well = f"{report}\n\n{restarts}", well and restarted
    machine = f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, gloo, 2 processes"
    report = f"{datetime.now(UTC):%Y-%m-%d}, {machine}, seed {given.seed}\n\n{report}\n"
    print(report)
    if given.output is not None:
        given.output.write_text(report)
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
