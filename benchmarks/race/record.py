"""One run: a system trains a model for three steps on rank 0 of W, on the simulated GPU; what it asked for is written down, and replayed.

    python -m benchmarks.race.record zero3 8b 64 1x2048 none        # in a process of its own, as it takes torch's CUDA slot

It prints JSON: a step's figures for each link and each way in which the host counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import pickle
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

from tests.device import simulated

import torch  # isort: skip

from benchmarks.race.machines import MACHINES, with_link  # isort: skip
from benchmarks.race.models import CHECKPOINTING, SHAPES, loss_of, model_of  # isort: skip
from benchmarks.race.systems import SYSTEMS  # isort: skip
from tests.device.clock import HOSTS, Clocks, Step  # isort: skip
from tests.device.dry_run import alone  # isort: skip

STEPS = 3  # the first makes the optimizer's state, and systems learn from it
LINKS = (400, 200, 100)  # Gbit/s a GPU


def record(
    system: str, name: str, ranks: int, rows: int, sequence: int, checkpointing: str, *, fused: bool = True, holds_logits: bool = False,
    steps: int = STEPS, **chosen: Any,
) -> list[Any]:  # fmt: skip
    """The log of the steps, with marks: "step", "backward", "clip", "optimizer". `holds_logits`: the loop
    keeps them during backward, in fp32."""
    device = simulated.C
    with alone(ranks):
        gc.collect()
        gc.disable()  # a collection would be a moment of its own in the memory
        device.take_log()
        device.log(True)
        try:
            training = SYSTEMS[system](model_of(name, sequence, checkpointing), ranks, **chosen)
            optimizer = torch.optim.AdamW(training.parameters, lr=1e-4, fused=fused, foreach=None if fused else True)
            for _ in range(steps):
                device.mark("step")
                _step(training, optimizer, rows, sequence, holds_logits)
            device.mark("step")
        finally:
            device.log(False)
            gc.enable()
        log = device.take_log()
        del training, optimizer
        gc.collect()
    return list(log)


def _step(training: Any, optimizer: torch.optim.Optimizer, rows: int, sequence: int, holds_logits: bool) -> None:
    ids = torch.empty(rows, sequence, dtype=torch.long, device="cuda")
    labels = torch.empty_like(ids)
    logits = training.model(ids)
    if holds_logits:
        logits = logits.float()
    loss = loss_of(logits, labels)
    if not holds_logits:
        del logits
    simulated.C.mark("backward")
    loss.backward()
    simulated.C.mark("clip")
    training.clip()
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
        "reserved": step.reserved, "phases": step.phases, "top": [[*key, step.kernels[key], step.spent[key]] for key in top],
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


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """One run, as `Recorders` asks for it. With `log`, a file: the log goes there, and nothing is replayed."""
    rows, sequence = map(int, asked["batch"].split("x"))
    began = time.perf_counter()
    log = record(asked["system"], asked["model"], asked["ranks"], rows, sequence, asked["checkpointing"], **asked["settings"])
    recorded = time.perf_counter() - began
    if asked.get("log"):
        Path(asked["log"]).write_bytes(pickle.dumps(log))
        return {"recorded": recorded}
    found = replayed(log)
    return {"entries": len(log), "recorded": recorded, "replayed": time.perf_counter() - began - recorded, "steps": found}


def serve() -> None:
    """Lines of JSON come in and go out. Whatever else is printed goes to stderr."""
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        out.write(json.dumps(answer(json.loads(line))) + "\n")
        out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=[*SYSTEMS, "serve"], help="`serve` reads runs from stdin")
    parser.add_argument("model", choices=SHAPES, nargs="?")
    parser.add_argument("ranks", type=int, nargs="?")
    parser.add_argument("batch", nargs="?", help="rows x tokens, such as 2x8192")
    parser.add_argument("checkpointing", choices=CHECKPOINTING, nargs="?")
    parser.add_argument("--settings", type=json.loads, default={}, help="of `record` and of the system, as JSON")
    parser.add_argument("--log", help="write the log to this file, and replay nothing")
    options = parser.parse_args()
    if options.system == "serve":
        return serve()
    print(json.dumps(answer(vars(options))))


if __name__ == "__main__":
    main()
