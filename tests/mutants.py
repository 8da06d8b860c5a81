"""Do the tests see? Faults, put into a copy of the package one at a time; each has to be caught.

make mutants                  all of them, a table at the end; exit code 1 if one survives or no longer applies
make mutants ARGS="padding"   those whose names contain a word
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Fault(NamedTuple):
    name: str
    file: str  # in zero3/
    right: str
    wrong: str
    tests: str  # files of tests/ that should see it, the likeliest first


FAULTS = [
    Fault("compute does not wait for a gather", "core/chunk.py", "self._in_flight.wait()\n", "pass\n", "core/no_sync"),
    Fault(
        "the fetch lane does not wait for compute",
        "comm/streams.py",
        "self._stream.wait_stream(",
        "(lambda stream: None)(",
        "core/ordering",
    ),
    Fault(
        "no wait for reductions at the end",
        "core/backward.py",
        "        self._drain_backups()\n        self._reduces",
        "        self._reduces",
        "core/no_sync",
    ),
    Fault(
        "a sum for a mean",
        "core/gradient_reducer.py",
        'self._mean = policy.gradient_reduction == "mean"',
        "self._mean = False",
        "core/no_sync",
    ),
    Fault("padding not zeroed", "core/gradient_buffer.py", "return zero_padding(full, self._layout)", "return full", "core/random_models"),
    Fault("slots without gradients not zeroed", "core/gradient_buffer.py", "view(full, self._layout, index).zero_()", "pass", "core/paths"),
    Fault(
        "a second micro-batch overwrites",
        "core/accumulation.py",
        "parameter.grad.add_(gradient)",
        "parameter.grad.copy_(gradient)",
        "core/no_sync",
    ),
    Fault(
        "a layer's second gradient takes the first's place",
        "core/gradient_buffer.py",
        "        if index in self._came:\n            self.flat()\n",
        "",
        "core/recomputation",
    ),
    Fault("a gradient used twice overwrites", "core/gradient_buffer.py", "slot.add_(gradient)", "slot.copy_(gradient)", "core/no_sync"),
    Fault(
        "a chunk's reduction skipped",
        "core/layer_gradients.py",
        "[gradient.back_up(lane, communicator) for gradient in trained]",
        "[gradient.back_up(lane, communicator) for gradient in trained[1:]]",
        "core/no_sync",
    ),
    Fault(
        "a kept layer outlives a step",
        "core/layer_state.py",
        "        self.release()  # a layer kept",
        "        # a layer kept",
        "core/exceptions",
    ),
    Fault(
        "a new forward trusts what is left",
        "core/runtime.py",
        "            self.reset(broken=False)\n",
        "",
        "core/exceptions",
    ),
    Fault("stale graphs pass", "core/layer_state.py", "            if chunk.changed():", "            if False:", "core/exceptions"),
    Fault(
        "a broken backward leaves its half",
        "core/backward.py",
        "                state.gradients.give_up()",
        "                pass",
        "core/exceptions",
    ),
    Fault("full buffers are never given back", "core/chunk.py", "        self._storage.resize_(0)", "        pass", "core/memory"),
    Fault(
        "prefetch goes one further",
        "core/runtime.py",
        "self._order.upcoming(self._depth)",
        "self._order.upcoming(self._depth + 1)",
        "core/memory core/counts",
    ),
    Fault(
        "ranks never find a difference",
        "comm/agreement.py",
        "if len({digests[rank] for rank in present}) <= 1 and not any(digests[rank][-1] for rank in present):",
        "if True:",
        "comm/agreement",
    ),
    Fault("messages carry no layer", "comm/gloo.py", "4 * self.channel + kind", "kind", "comm/faults"),
    Fault(
        "a rank's share left out of sums",
        "comm/gloo.py",
        "for summand in rest:",
        "for summand in rest[1:]:",
        "core/training_processes comm/collectives",
    ),
    Fault(
        "a place is used again before all have read it",
        "comm/shared_memory/host_memory.py",
        "if all(header[self._receipt(place, rank)] == header[self._at(place)] for rank in self.near):",
        "if True:",
        "comm/collectives comm/shared_memory",
    ),
    Fault(
        "transfers of a layer are found in any order",
        "comm/shared_memory/host_memory.py",
        " and header[at + 2] == turn",
        "",
        "comm/collectives comm/shared_memory",
    ),
    Fault(
        "a norm of one rank's slice",
        "optim/clipping.py",
        "            communicator.all_reduce(total)\n",
        "            pass\n",
        "optim/clip_grad_norm",
    ),
    Fault(
        "kept gradients survive zero_grad",
        "core/gradient_reducer.py",
        "            if now is None or (",
        "            if False and (",
        "core/no_sync",
    ),
    Fault(
        "a transaction that is not taken back",
        "core/gradient_reducer.py",
        "before, self._before, self._staged = self._before, None, []",
        "before, self._before = self._before, None",
        "resilience/step_guard",
    ),
    Fault(
        "a guard that asks nobody",
        "resilience/step_guard.py",
        "enumerate(told) if what}",
        "enumerate(told) if what and rank == self.rank}",
        "resilience/step_guard",
    ),
    Fault(
        "a rank that fails leaves at once", "resilience/step_guard.py", "replay.replay_the_rest()", "reset(model)", "resilience/step_guard"
    ),
    Fault(
        "a layer given back while it is filled",
        "core/chunk.py",
        "        self.finish_fetch()\n        if self._computing",
        "        if self._computing",
        "core/ordering_fuzz",
    ),
]


def main(words: list[str]) -> int:
    survivors = 0
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    print(f"{'fault':45} {'caught by':60} {'s':>5}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        copy = Path(place)
        for name in ("zero3", "tests"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for fault in chosen:
            began = time.monotonic()
            caught = _caught_by(fault, copy)
            survivors += not caught
            print(f"{fault.name:45} {caught or 'NOTHING':60} {time.monotonic() - began:5.1f}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} caught")
    return int(survivors > 0)


def _caught_by(fault: Fault, copy: Path) -> str:
    source = copy / "zero3" / fault.file
    right = source.read_text()
    if right.count(fault.right) != 1:
        return ""
    source.write_text(right.replace(fault.right, fault.wrong))
    try:
        for test in fault.tests.split():
            found = _first_failure(_path_of(test), copy)
            if found:
                return found
    finally:
        source.write_text(right)
    return ""


def _path_of(test: str) -> str:
    """`core/no_sync` -> its file."""
    folder, _, name = test.rpartition("/")
    return f"tests/{folder}/test_{name}.py"


def _first_failure(test: str, copy: Path) -> str:
    command = [
        sys.executable,
        "-B",
        "-m",
        "pytest",
        "-q",
        "-x",
        "--no-header",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-o",
        "timeout=60",
        test,
    ]
    try:
        done = subprocess.run(command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        return f"{test} (it hangs)"
    if done.returncode == 0:
        return ""
    failed = [line.split()[1].split("::", 1)[-1] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return f"{test.removeprefix('tests/').removesuffix('.py')}: {(failed or [f'exit code {done.returncode}'])[0]}"[:60]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="of the faults' names; all by default")
    sys.exit(main(parser.parse_args().words))
