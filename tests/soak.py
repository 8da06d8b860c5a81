"""Trains for a long time while faults are injected, and compares with the same run undisturbed. `make soak MINUTES=30`

Two processes on gloo train on the same data twice. In the second run, at random, a rank runs out of memory or raises in a
forward or backward, all ranks do, a batch holds nan, or can't be loaded: every fault is dropped by `step_guard` and its
micro-batch run again. Then the losses have to be the same bits; memory, descriptors, threads and groups as at the beginning.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero3
from tests.processes import Rank, on_ranks

WIDTH, DEPTH, MICRO_BATCHES = 64, 6, 2
FAULTS = ("a forward", "a backward", "out of memory", "a batch that can't be loaded", "a nan", "all ranks at once")
PER_STEP = 0.5  # faults


class Lost(Exception):
    pass


def train(rank: Rank, steps: int, seconds: float, seed: int | None) -> dict[str, Any]:
    """`steps` steps, or as many as go into `seconds`; with a seed, faults. What came of it."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(DEPTH)]
    model = zero3.Zero3Sequential([zero3.Zero3Layer(block) for block in blocks])
    optimizer = torch.optim.AdamW(model.get_trainable_chunk(), lr=1e-3)
    dice, losses, counts = random.Random(seed), [], Counter()  # the same faults are drawn on all ranks
    began, usage, until = time.monotonic(), [], torch.zeros(1)
    while len(losses) < steps or not steps:
        for number in range(MICRO_BATCHES):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1000 * len(losses) + 10 * number + rank.number))
            while True:
                may_fail = seed is not None and len(losses) > 0  # the first micro-batch teaches the ranks what they do
                fault = dice.choice(FAULTS) if may_fail and dice.random() < PER_STEP / MICRO_BATCHES else None
                unlucky, where = dice.randrange(rank.world_size), dice.randrange(DEPTH)
                mine = fault is not None and (fault == "all ranks at once" or unlucky == rank.number)
                with zero3.step_guard(model) as guarded:
                    loss = attempt(model, x, fault if mine else None, where)
                counts[f"{fault}: injected"] += fault is not None
                counts[f"{fault}: survived"] += guarded.failed
                if not guarded.failed:
                    break
        zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        if len(losses) % 50 == 10:
            usage.append(used())
        until.fill_(float(time.monotonic() - began > seconds))
        if not steps:
            dist.all_reduce(until, op=dist.ReduceOp.MAX)
            if until.item():
                break
    return {"losses": losses, "counts": dict(counts), "usage": [*usage, used()], "seconds": time.monotonic() - began}


def attempt(model: zero3.Zero3Sequential, x: Tensor, fault: str | None, where: int) -> float:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("injected") if fault == "out of memory" else Lost("injected")

    if fault == "a batch that can't be loaded":
        fail()
    handle = model[where].module.register_forward_hook(fail) if fault in ("a forward", "out of memory", "all ranks at once") else None
    try:
        y = model(x * float("nan") if fault == "a nan" else x)
        loss = (y - x.roll(1, -1)).square().mean() / MICRO_BATCHES
        if fault == "a backward":
            y.register_hook(fail)
        loss.backward()
        if not loss.isfinite():
            raise Lost("nan")
        return loss.item()
    finally:
        if handle is not None:
            handle.remove()


def used() -> dict[str, int]:
    gc.collect()
    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[1])
    return {
        "resident kB": pages * os.sysconf("SC_PAGE_SIZE") // 1024,
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "Python threads": threading.active_count(),
        "process groups": dist.get_pg_count() if hasattr(dist, "get_pg_count") else len(dist.distributed_c10d._world.pg_map),
        "tensors": sum(issubclass(type(each), Tensor) for each in gc.get_objects()),
    }


def main(minutes: float, seed: int) -> int:
    options = {"group_timeout": 60.0, "join_timeout": 60 * minutes * 4 + 300, "debug": "OFF"}
    disturbed = on_ranks(2, train, 0, 60 * minutes, seed, **options)[0]
    steps = len(disturbed["losses"])
    calm = on_ranks(2, train, steps, 0.0, None, **options)[0]
    counts = disturbed["counts"]
    print(f"{'fault':32} {'injected':>9} {'survived':>9}")
    for fault in FAULTS:
        print(f"{fault:32} {counts.get(f'{fault}: injected', 0):9} {counts.get(f'{fault}: survived', 0):9}")
    injected = sum(number for name, number in counts.items() if name.endswith("injected"))
    survived = sum(number for name, number in counts.items() if name.endswith("survived"))
    same = disturbed["losses"] == calm["losses"]
    print(f"{steps} steps in {disturbed['seconds']:.0f} s (undisturbed: {calm['seconds']:.0f} s); {injected} faults, {survived} survived")
    print(f"losses the same bits as undisturbed: {same}; steps lost beyond the dropped micro-batches: {0 if same else 'some'}")
    first, last = disturbed["usage"][0], disturbed["usage"][-1]
    grown = [name for name in first if last[name] > first[name] + (20_000 if name == "resident kB" else 0)]
    for name in first:
        print(f"{name:32} {first[name]:9} {last[name]:9}   (after the first steps, at the end)")
    return int(not same or injected != survived or bool(grown))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0, int(sys.argv[2]) if len(sys.argv) > 2 else 0))
