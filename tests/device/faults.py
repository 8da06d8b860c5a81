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
from typing import Any  # isort: skip

import torch  # isort: skip

import zero3  # isort: skip
from tests.device import scenarios as real_scenarios  # isort: skip
from tests.device.fault_list import ELSEWHERE, FAULTS, Fault  # isort: skip
from tests.device.training import Me, scratch  # isort: skip
from tests.device.ranks import run_ranks  # isort: skip

PACKAGE = Path(zero3.__file__).parent
_ON_ZERO3 = ("zero3", "tests.device.scenarios", "tests.device.training")  # they and what is in them are imported anew
POLICIES = ("random", "lanes", "compute", "demand")
MEMORIES = ("strict", "exact")
SEEDS = 2

DRAWN_FROM = [
    "comm/streams.py", "core/chunk.py", "core/ticket.py", "core/flow.py", "core/account.py", "core/gradient_buffer.py", "core/backward.py",
]  # fmt: skip
_SETTINGS = [("demand", "strict", 0), ("lanes", "strict", 0), ("random", "exact", 1), ("compute", "exact", 1), ("random", "strict", 0)]
_ORDER = re.compile(
    r"wait|issue|complete|record|allocate|free|_ticket|leg|popleft|under_way|later|lane|stream|held|full\b|drain|release|fetch"
)
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
