"""What tests say of a fault. Only a test that fails, and passes without the fault, has caught it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from tests.mutation.places import compiles
from tests.mutation.tree import Tree

CAUGHT, HANGS, SURVIVED, NOT_RUN, UNCLEAR = "caught", "hangs", "SURVIVED", "NOT RUN", "UNCLEAR"
STILLBORN = "stillborn"  # the package can't be imported with it, or not even compiled: no fault that anybody could overlook
FIRST_LIMIT = 900.0  # seconds, of a test file of which nothing is known yet
BATCHES = (1, 4, 16)  # files a run; then the rest: to start pytest takes longer than most files


class Verdict(NamedTuple):
    kind: str
    why: str  # the test that has failed; how many have passed


class Baseline:
    """How long test files take without a fault; a file that does not pass then is of no use. Kept in a file."""

    def __init__(self, path: Path, digest: str) -> None:
        self._path, self._digest, self._lock = path, digest, Lock()
        known = json.loads(path.read_text()) if path.exists() else {}
        self._seconds: dict[str, float | None] = known["seconds"] if known.get("digest") == digest else {}

    def seconds(self, tree: Tree, test: str) -> float | None:
        """None: it fails without a fault."""
        with self._lock:
            if test not in self._seconds:
                run = tree.run([test], FIRST_LIMIT, first_failure=False)
                self._seconds[test] = run.seconds if run.passed or run.code == 5 else None  # 5: it has no tests here
                if self._seconds[test] is None:
                    print(f"not used: {test} fails without a fault ({', '.join(run.failed[:3]) or f'exit code {run.code}'})", flush=True)
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._path.write_text(json.dumps({"digest": self._digest, "seconds": self._seconds}))
            return self._seconds[test]

    def usable(self, tree: Tree, tests: Iterable[str]) -> list[str]:
        return [test for test in tests if self.seconds(tree, test) is not None]

    def limit(self, tree: Tree, tests: Sequence[str]) -> float:
        """Far beyond what they take, on a machine that has become busy too."""
        return 180 + 8 * sum(self.seconds(tree, test) or 0.0 for test in tests)


def judge(tree: Tree, baseline: Baseline, file: str, source: bytes, tests: Sequence[str]) -> Verdict:
    """`tests`: files, the likeliest first. `source`: of `file`, with the fault in it."""
    if not compiles(source):
        return Verdict(STILLBORN, "it does not compile")
    if not tests:
        return Verdict(NOT_RUN, "no test file runs this line")
    passed = 0
    for batch in batches(tests):
        used = baseline.usable(tree, batch)
        if not used:
            continue
        with tree.holding(file, source):
            found = _judge_batch(tree, used, baseline.limit(tree, used))
        if found is not None:
            return found
        passed += len(used)
    return Verdict(SURVIVED, f"{passed} test files pass") if passed else Verdict(NOT_RUN, "no usable test file runs this line")


def batches(tests: Sequence[str]) -> Iterable[Sequence[str]]:
    start = 0
    for size in (*BATCHES, len(tests)):
        if start < len(tests):
            yield tests[start : start + size]
        start += size


def _judge_batch(tree: Tree, tests: Sequence[str], limit: float) -> Verdict | None:
    """None: all pass."""
    run = tree.run(tests, limit)
    if run.code == 1 and not run.failed:  # an error around a test has ended the run: does a test fail as well?
        run = tree.run(tests, limit, first_failure=False)
    if run.code is None:
        return Verdict(HANGS, f"not over after {run.seconds:.0f} s: {' '.join(tests[:2])}")
    if run.code == 1 and run.failed:
        return Verdict(CAUGHT, run.failed[0])
    if run.passed or run.code == 5:
        return None
    if not tree.imports():
        return Verdict(STILLBORN, "the package can't be imported")
    return Verdict(UNCLEAR, f"no test fails, but pytest ended with {run.code}: {' '.join(tests[:2])}")
