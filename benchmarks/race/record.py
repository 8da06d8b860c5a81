"""A run of three steps on rank 0 of W, on the simulated GPU: what it asked for is written down, and replayed.

To be imported before torch, in a process of its own (`runs.apart`), as it takes torch's CUDA slot.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any
from unittest.mock import patch

from tests.device import simulated

import torch  # isort: skip
import torch._dynamo  # isort: skip  # models on meta import it; here, before processes fork, once for all of them
from torch.distributed.tensor import DTensor  # isort: skip

from benchmarks.race.machines import LINKS, MACHINES, with_link  # isort: skip
from benchmarks.race.models import loss_of, model_of  # isort: skip
from benchmarks.race.pool import pooled  # isort: skip
import zero3  # isort: skip
from benchmarks.race.runs import FULL_BUFFER, LONG, Run  # isort: skip
from benchmarks.race.systems import SYSTEMS, Training  # isort: skip
from tests.device.caching import UNIT  # isort: skip
from tests.device.clock import HOSTS, Clocks, Step  # isort: skip
from tests.device.dry_run import alone  # isort: skip
from zero3.core.full_buffer import FullBuffer  # isort: skip

STEPS = 3  # the first makes the optimizer's state, and systems learn from it
BY_LISTS, HOLDS_LOGITS = "by_lists", "holds_logits"  # AdamW that is not fused; logits that the loop keeps during backward, in fp32


def logged(run: Run, steps: int = STEPS, looks: Callable[[Training, torch.optim.Optimizer], None] = lambda *_: None) -> list[Any]:
    """The log of the steps, with marks: "step", "backward", "clip", "optimizer". `looks` is called before each "optimizer"."""
    device, loop = simulated.C, (BY_LISTS, HOLDS_LOGITS)
    with alone(run.ranks):
        gc.collect()
        gc.disable()  # a collection would be a moment of its own in the memory
        device.take_log()
        device.log(True)
        try:
            chosen = {name: True for name in run.chosen if name not in loop}
            training = SYSTEMS[run.system](model_of(run.model, run.sequence, run.checkpointing), run.ranks, **chosen)
            fused = BY_LISTS not in run.chosen
            optimizer = torch.optim.AdamW(training.parameters, lr=1e-4, fused=fused, foreach=None if fused else True)
            for _ in range(steps):
                device.mark("step")
                _step(training, optimizer, run, looks)
            device.mark("step")
        finally:
            device.log(False)
            gc.enable()
        log = device.take_log()
        del training, optimizer
        gc.collect()
    return _by_appearance(log)


def _by_appearance(log: list[Any]) -> list[Any]:
    """Streams are numbered as they appear, and not as all runs of this process have made them."""
    numbers = {0: 0}
    return [(kind, name, numbers.setdefault(stream, len(numbers)), *rest) for kind, name, stream, *rest in log]


def _step(training: Training, optimizer: torch.optim.Optimizer, run: Run, looks: Callable[..., None]) -> None:
    ids = torch.empty(run.rows, run.part, dtype=torch.long, device="cuda")
    labels = torch.empty_like(ids)
    if LONG in run.chosen:
        with training.around:
            loss = training.model(ids, labels)
        simulated.C.mark("backward")
        zero3.backward(loss, ids.numel(), training.model)
    else:
        logits = training.model(ids)
        if HOLDS_LOGITS in run.chosen:
            logits = logits.float()
        loss = loss_of(logits, labels)
        if HOLDS_LOGITS not in run.chosen:
            del logits
        simulated.C.mark("backward")
        loss.backward()
    simulated.C.mark("clip")
    training.clip()
    looks(training, optimizer)
    simulated.C.mark("optimizer")
    optimizer.step()
    optimizer.zero_grad()


def figures(step: Step) -> dict[str, Any]:
    """What is told of a step, as JSON has it."""
    top = sorted(step.spent, key=lambda key: -step.spent[key])[:12]
    return {
        "seconds": step.seconds, "compute": step.compute, "exposed": step.exposed, "starved": step.starved, "host": step.host,
        "launches": step.launches, "collectives": dict(step.collectives), "moved": dict(step.moved), "waits": sorted(set(step.waits)),
        "host_waits": len(step.waits), "copies": [step.copies[0], step.copies.total() - step.copies[0]],
        "copied": [step.copied[0], step.copied.total() - step.copied[0]], "allocated": step.allocated, "active": step.active,
        "requested": step.requested, "reserved": step.reserved, "phases": step.phases,
        "top": [[*key, step.kernels[key], step.spent[key]] for key in top],
    }  # fmt: skip


def replayed(log: list[Any]) -> dict[str, Any]:
    """A steady step's figures, by machine, link and host: "H100 of 500 W, 400, launches". Memory is the first one's.

    The second machine is there for one way in which the host counts, and the processor's time for one link.
    """
    found: dict[str, Any] = {}
    times = [entry for entry in log if entry[0] not in "afu"]  # memory does not ask for the time
    first, *_ = MACHINES
    for machine, link, host in product(MACHINES, LINKS, HOSTS):
        if host == "launches" or (machine == first and (host == "free" or link == LINKS[0])):
            clocks = Clocks(with_link(MACHINES[machine], link), HOSTS[host])
            found[f"{machine}, {link}, {host}"] = figures(clocks.replay(times if found else log)[-1])
    return found


def causes(run: Run) -> dict[str, float]:
    """What the bytes at the peak of the last step are for, as `peak_by_cause` tells it."""
    blocks: dict[int, str] = {}

    def look(training: Training, optimizer: torch.optim.Optimizer) -> None:
        tensors = [(parameter, "sharded parameters") for parameter in training.parameters]
        tensors += [(each, "optimizer") for state in optimizer.state.values() for each in state.values() if isinstance(each, torch.Tensor)]
        for tensor, cause in tensors:
            blocks[simulated.C.block_of(tensor.to_local() if isinstance(tensor, DTensor) else tensor)] = cause

    return peak_by_cause(logged(run, looks=look), blocks)


def peak_by_cause(log: list[Any], blocks: dict[int, str]) -> dict[str, float]:
    """Bytes at the peak of the last step, and by cause. What is in none of these blocks is "all else"."""
    live: dict[int, float] = {}
    now = Counter[str]()
    most = now.copy()
    for kind, name, _, ident, _, nbytes, *_ in log:
        if kind == "m" and name == "step":
            last, most = most, now.copy()
        elif kind == "a" or (kind == "f" and ident in live):
            cause, nbytes = blocks.get(ident, "all else"), -live.pop(ident) if kind == "f" else -(-int(nbytes) // UNIT) * UNIT
            if kind == "a":
                live[ident] = nbytes
            now[cause] += nbytes
            most = now.copy() if now.total() > most.total() else most
    return {**last, "peak": last.total()}


def held(run: Run) -> dict[str, dict[str, int]]:
    """What torch's allocator holds in the last step as it is, and if full buffers came from a pool."""
    allocate = FullBuffer.allocate

    def marked(full: FullBuffer) -> None:
        simulated.C.mark(FULL_BUFFER)
        allocate(full)
        simulated.C.mark(FULL_BUFFER)

    with patch.object(FullBuffer, "allocate", marked):
        log = logged(run)
    first, *_ = MACHINES
    found = {}
    for way, entries in (("as it is", log), ("pooled", pooled(log))):
        step = Clocks(with_link(MACHINES[first], LINKS[0]), HOSTS["free"]).replay(entries)[-1]
        found[way] = {"allocated": step.allocated, "reserved": step.reserved, "segments": step.segments}
    return found


def told(run: Run) -> dict[str, Any]:
    """One run's figures."""
    began = time.perf_counter()
    log = logged(run)
    recorded = time.perf_counter() - began
    found = replayed(log)
    return {"entries": len(log), "recorded": recorded, "replayed": time.perf_counter() - began - recorded, "steps": found}
