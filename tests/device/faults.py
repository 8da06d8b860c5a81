"""Waits, holds and orders taken out of zero3, one at a time: does the simulated device see it?

    python -m tests.device.faults               the table of docs/reliability.md
    python -m tests.device.faults --drawn 10 --seed 0
                                                statements drawn at random, from lines of five files that touch order

A fault is an edit of the package's text. The package is imported anew with it, beside the real one, and then forgotten.
"""

from tests.device import simulated

import argparse  # isort: skip
import ast  # isort: skip
import functools  # isort: skip
import importlib  # isort: skip
import logging  # isort: skip
import os  # isort: skip
import random  # isort: skip
import re  # isort: skip
import sys  # isort: skip
from collections.abc import Iterator  # isort: skip
from contextlib import contextmanager  # isort: skip
from importlib.machinery import PathFinder, SourceFileLoader  # isort: skip
from pathlib import Path  # isort: skip
from typing import Any, NamedTuple  # isort: skip

import torch  # isort: skip

import zero3  # isort: skip
from tests.device import scenarios as real_scenarios  # isort: skip
from tests.device.training import Me, scratch  # isort: skip
from tests.device.ranks import run_ranks  # isort: skip

PACKAGE = Path(zero3.__file__).parent
_ON_ZERO3 = ("zero3", "tests.device.scenarios", "tests.device.training")  # they and what is in them are imported anew
POLICIES = ("random", "lanes", "compute", "demand")
MEMORIES = ("strict", "exact")
SEEDS = 2
ELSEWHERE = "shard, on a device that is not current"


class Fault(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    scenario: str = "prefetch_depth_1"


_COMPUTE = "torch.accelerator.current_stream(self._stream.device)"
_LANDS = "        if then is not None:\n            then()\n"
_RECORDS = "        event = torch.Event(self._stream.device)\n        event.record(self._stream)\n"
FAULTS = [
    Fault("the fetch lane does not wait for compute", "core/chunk.py", "        with lane.issue():\n", "        with lane._stream:\n"),
    Fault(
        "the backup lane does not wait for compute",
        "core/gradient_reducer.py",
        "        with lane.issue():\n",
        "        with lane._stream:\n",
    ),
    Fault("the layer computes without waiting for its gather", "core/chunk.py", "            self._in_flight.wait()\n", ""),
    Fault(
        "the optimizer steps without waiting for reductions",
        "core/backward.py",
        "                self._back_up(state)\n        self.drain_backups()\n",
        "                self._back_up(state)\n        self._backups.clear()\n",
    ),
    Fault(
        "a reduction's buffers are given back at once",
        "core/gradient_reducer.py",
        "(sending.travelling, summed, landed), self._naming)",
        "(), self._naming)",
    ),
    Fault(
        "the full buffer is allocated on another stream",
        "core/chunk.py",
        "        self.full.allocate()\n",
        "        with torch.Stream(self.shard.device):\n            self.full.allocate()\n",
    ),
    Fault(
        "a lane's event is recorded before the sum lands",
        "comm/streams.py",
        _LANDS + _RECORDS,
        _RECORDS + _LANDS,
    ),
    Fault(
        "the sum lands beside its lane",
        "core/gradient_reducer.py",
        "            mark = lane.complete(pending, lambda: self._land(summed, landed))\n",
        "            mark = lane.complete(pending)\n        self._land(summed, landed)\n",
    ),
    Fault(
        "an earlier reduction is dropped, not waited for",
        "core/backward.py",
        "            self._later.extend(self._backups.popleft().wait())\n        with state.backup_span",
        "            self._backups.popleft()\n        with state.backup_span",
    ),
    Fault(
        "compute waits on the current device, not on the model's",
        "comm/streams.py",
        "torch.accelerator.current_stream(self._device).wait_event",
        "torch.accelerator.current_stream().wait_event",
        ELSEWHERE,
    ),
    Fault(
        "a lane waits for the current device, not for the model's",
        "comm/streams.py",
        f"self._stream.wait_stream({_COMPUTE})",
        "self._stream.wait_stream(torch.accelerator.current_stream())",
        ELSEWHERE,
    ),
    Fault(
        "a buffer is given back while it is filled",
        "core/chunk.py",
        "    def release(self) -> None:\n        self.finish_fetch()\n",
        "    def release(self) -> None:\n        self._in_flight = None\n",
        "another_path",
    ),
    Fault(
        "a reset does not wait for reductions",
        "core/backward.py",
        "                self.drain_backups()\n            except",
        "                self._backups.clear()\n            except",
        "an_exception_and_on",
    ),
    Fault(
        "kept gradients are reduced without a wait at the end",
        "core/backward.py",
        "                self._back_up(state, whole=True)\n        self.drain_backups()\n",
        "                self._back_up(state, whole=True)\n        self._backups.clear()\n",
        "stage_1",
    ),
    Fault(
        "a sum over replicas does not wait for the reduction",
        "core/replicas.py",
        "            with lane.issue():",
        "            with lane._stream:",
        "mesh",
    ),
    Fault(
        "the optimizer steps without waiting for sums over replicas",
        "core/backward.py",
        "        while self._later:\n            self._later.extend(self._later.popleft().wait())\n",
        "        self._later.clear()\n",
        "mesh",
    ),
    Fault(
        "the buffers of a sum over replicas are given back at once",
        "core/replicas.py",
        "_Later(later, (sending.summed, sending.landed))",
        "_Later(later, ())",
        "mesh_no_sync",
    ),
    Fault(
        "what a replica has kept is given back while its lane reads it",
        "core/replicas.py",
        "        return self.later\n",
        "        return self.later\n\n    def __setattr__(self, name: str, value: object) -> None:\n        if name != 'earlier':\n"
        "            object.__setattr__(self, name, value)\n",
        "mesh_no_sync",
    ),
    Fault(
        "the ranks' hashes are read before they have come",
        "comm/streams.py",
        "            self._made.synchronize()\n",
        "            pass\n",
    ),
    Fault(
        "what a gather brings is given back before it is decoded",
        "core/compressed.py",
        "        room = self._room or self._new_room()\n",
        "        room, self._room = self._room or self._new_room(), None\n",
        "compressed",
    ),
    Fault(
        "what a gather brings is allocated on another stream",
        "core/compressed.py",
        "            self._room = self._new_room()\n",
        "            with torch.Stream(self.shard.device):\n                self._room = self._new_room()\n",
        "compressed",
    ),
    Fault(
        "gradients' codes are given back at once",
        "core/compressed.py",
        "        self.travelling = full, self._sent, self._received, self._work\n",
        "        self.travelling = full\n",
        "compressed",
    ),
    Fault(
        "gradients are given back while they are encoded",
        "core/compressed.py",
        "        self.travelling = full, self._sent",
        "        self.travelling = self._sent",
        "compressed",
    ),
    Fault(
        "a sum over replicas does not wait until gradients are decoded",
        "core/replicas.py",
        "            with lane.issue():",
        "            with lane._stream:",
        "mesh_compressed",
    ),
    Fault(
        "an activation is used before it is back, and freed before it is out",
        "offload/rests.py",
        "        if self._mark is not None:\n            self._mark.wait()\n        busy",
        "        busy",
        "offload_activations",
    ),
    Fault(
        "a graph is dropped while activations come back",
        "offload/rests.py",
        "        self._settle()  # else compute would",
        "        pass  # else compute would",
        "offload_activations",
    ),
    Fault(
        "a file's activation is written before it is on the host",
        "offload/rests.py",
        "            host = copy.tensor()\n",
        "            host = copy._copy\n",
        "offload_activations_to_a_file",
    ),
    Fault(
        "the host takes a gradient before it has come",
        "core/offloaded_chunk.py",
        "copies[0].tensor(), copies[-1].tensor()",
        "copies[0]._copy, copies[-1]._copy",
        "offload_to_cpu_shard",
    ),
    Fault(
        "a gradient is copied to the host beside its lane",
        "core/offloaded_chunk.py",
        "        both = (landed, summed)",
        "        torch.Stream(self.device).__enter__()\n        both = (landed, summed)",
        "offload_to_cpu_shard",
    ),
    Fault(
        "a gradient's buffers are given back before it is on the host",
        "core/offloaded_chunk.py",
        "        later = self.mark.wait()\n",
        "        later = None\n",
        "offload_to_cpu_shard",
    ),
    Fault(
        "a chunk is copied to the device beside the fetch lane",
        "core/offloaded_chunk.py",
        "        first.copy_(to_copy, non_blocking=True)\n",
        "        with torch.Stream(self.device):\n            first.copy_(to_copy, non_blocking=True)\n",
        "offload_to_cpu_shard",
    ),
    Fault(
        "the memory in which a chunk is cast is given back at once",
        "core/offloaded_chunk.py",
        "        return self._communicator.all_gather(full, own if first",
        "        self._passing = self._nothing\n        return self._communicator.all_gather(full, own if first",
        "offload_to_cpu_bf16",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a forward",
        "core/runtime.py",
        "                self.backward.offloaded.settle(before_backward=self.awaits_backward)\n",
        "                pass\n",
        "offload_and_forwards_without_backward",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a forward with gradients",
        "core/offloaded_chunk.py",
        "        if not (before_backward and chunk.begins):\n",
        "        if not before_backward:\n",
        "offload_and_forwards_without_backward",
    ),
    Fault(
        "the host writes a chunk that is being copied, after a backward",
        "core/backward.py",
        "            self.offloaded.settle()\n",
        "            pass\n",
        "offload_and_a_frozen_first_layer",
    ),
    Fault(
        "the host writes a chunk that is being copied, after full_params",
        "core/pinning.py",
        "        settle(state)\n",
        "        pass\n",
        "offload_and_forwards_without_backward",
    ),
    Fault(
        "gradients on the host are unscaled by a number that has not come",
        "optim/grad_scaler.py",
        "each.cpu() if self._from_afar(optimizer) else each",
        "each",
        "offload_to_cpu_grad_scaler",
    ),
    Fault(
        "the host copies hashes without an event",
        "comm/streams.py",
        "        if later:\n            self._made = ",
        "        if not later:\n            self._made = ",
    ),
]

DRAWN_FROM = ["comm/streams.py", "core/chunk.py", "core/gradient_reducer.py", "core/gradient_buffer.py", "core/backward.py"]
_SETTINGS = [("demand", "strict", 0), ("lanes", "strict", 0), ("random", "exact", 1), ("compute", "exact", 1), ("random", "strict", 0)]
_ORDER = re.compile(r"wait|issue|complete|record|allocate|free|_in_flight|popleft|_backups|lane|stream|held|full\b|drain|release|fetch")
TRIED = [
    "prefetch_depth_1", "shard", "another_path", "an_exception_and_on", "no_sync", "checkpoint_not_reentrant", "stage_1", "transactional",
    "step_guard", "evaluation_between_steps", "resident", "bf16", "dynamic", "param_groups_whole", "full_params_and_load",
    "a_view_that_escapes", "by_hand", ELSEWHERE,
]  # fmt: skip


def drawn(count: int, seed: int) -> list[Fault]:
    """Statements that are left out."""
    found = []
    for file in DRAWN_FROM:
        text = (PACKAGE / file).read_text()
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            simple = isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) and not isinstance(getattr(node, "value", None), ast.Constant)
            inside = simple and node.col_offset >= 8  # type: ignore[attr-defined]
            if not inside or not _ORDER.search(ast.unparse(node)):
                continue
            right = "".join(lines[node.lineno - 1 : node.end_lineno])  # type: ignore[attr-defined]
            if text.count(right) == 1:
                found.append(Fault(f"`{ast.unparse(node)[:90]}`", file, right, " " * node.col_offset + "pass\n"))  # type: ignore[attr-defined]
    return random.Random(seed).sample(found, count)


class _Edited(SourceFileLoader):
    """Loads a file with a fault in it."""

    fault: Fault

    def get_code(self, fullname: str) -> Any:
        text = Path(self.path).read_text()
        assert text.count(self.fault.right) == 1, f"{self.fault.file} does not have exactly one: {self.fault.right!r}"
        return compile(text.replace(self.fault.right, self.fault.wrong), self.path, "exec")


class _Finder:
    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = PathFinder.find_spec(name, path) if name.startswith("zero3.") else None
        if spec is not None and spec.origin == str(PACKAGE / self._fault.file):
            spec.loader = _Edited(name, spec.origin)
            spec.loader.fault = self._fault
        return spec


def _taken_out() -> dict[str, Any]:
    names = [name for name in sys.modules if any(name == each or name.startswith(f"{each}.") for each in _ON_ZERO3)]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def broken(fault: Fault) -> Iterator[Any]:
    """The scenarios, on a zero3 that has the fault."""
    real = _taken_out()
    finder = _Finder(fault)
    sys.meta_path.insert(0, finder)  # type: ignore[arg-type]
    try:
        yield importlib.import_module("tests.device.scenarios")
    finally:
        sys.meta_path.remove(finder)  # type: ignore[arg-type]
        _taken_out()
        sys.modules.update(real)


def values(scenarios: Any, name: str) -> list[list[torch.Tensor]]:
    elsewhere = name == ELSEWHERE
    directory, ranks = scratch(), 4 if name in real_scenarios.ON_MESHES else 2

    def body(rank: int) -> list[torch.Tensor]:
        device = torch.device("cuda", rank + 2 * elsewhere)
        me = Me(rank, ranks, device, None, directory)
        return [each.cpu() for each in scenarios.SCENARIOS["shard" if elsewhere else name](me)]

    return run_ranks(ranks, body, device_of=lambda rank: rank + 2 * elsewhere, set_device=not elsewhere)


@functools.cache
def expected(name: str) -> list[list[torch.Tensor]]:
    simulated.schedule(eager=True)
    return values(real_scenarios, name)


def seen(scenarios: Any, name: str, policy: str, memory: str, seed: int) -> str:
    """What shows the fault in this schedule, or ""."""
    want = expected(name)
    simulated.schedule(policy, seed, progress=0.2 * (seed % 2), memory=memory)
    try:
        found = values(scenarios, name)
        same = all(torch.equal(a, b) for mine, theirs in zip(found, want, strict=True) for a, b in zip(mine, theirs, strict=True))
        return "" if same else "other numbers"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
    finally:
        simulated.recover()


def row(fault: Fault) -> dict[tuple[str, str], int]:
    """In how many of the seeds each policy, with each memory, shows the fault."""
    with broken(fault) as scenarios:
        return {
            (policy, memory): sum(bool(seen(scenarios, fault.scenario, policy, memory, seed)) for seed in range(SEEDS))
            for policy in POLICIES
            for memory in MEMORIES
        }


def first_sight(fault: Fault, names: list[str]) -> str:
    """The first scenario and schedule that show the fault, and how; "" if none does. A scenario that is named again gets other seeds."""
    with broken(fault) as scenarios:
        for attempt, name in enumerate(names):
            for policy, memory, seed in _SETTINGS:
                if how := seen(scenarios, name, policy, memory, seed + 2 * attempt):
                    return f"{name}, {policy}, {memory}: {how}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    ones = torch.ones(4, 4, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.linear(ones, ones).cpu()  # see `_first_bf16` in test_parity.py
    if arguments.drawn:
        print("| left out | file | seen by |\n|---|---|---|")
        for fault in drawn(arguments.drawn, arguments.seed):
            print(f"| {fault.name} | `{fault.file}` | {first_sight(fault, TRIED) or '**not seen**'} |", flush=True)
        return
    columns = [(policy, memory) for memory in MEMORIES for policy in POLICIES]
    print("| left out | scenario |", " | ".join(f"{policy}, {memory}" for policy, memory in columns), "|")
    print("|---|---|" + "---|" * len(columns))
    for fault in FAULTS:
        found = row(fault)
        print(f"| {fault.name} | {fault.scenario} |", " | ".join(f"{found[column]} of {SEEDS}" for column in columns), "|", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without waiting for threads of ranks that are stuck
