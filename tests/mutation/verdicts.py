"""What tests say of a fault. Only a test that fails, and passes without the fault, has caught it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tests.mutation.coverage_map import CoverageMap
from tests.mutation.places import compiles
from tests.mutation.tree import Run, Tree

CAUGHT, SURVIVED, NOT_RUN, UNCLEAR = "caught", "SURVIVED", "NOT RUN", "UNCLEAR"
TIMED_OUT = "timed out"  # a test has failed because it did not end: caught too, and told apart
STILLBORN = "stillborn"  # the package can't be imported with it, or not even compiled: no fault that anybody could overlook
STAGES = (2.0, 15.0)  # seconds of tests in a run; then the rest: most faults are seen by the first tests, and files take time to collect


class Verdict(NamedTuple):
    kind: str
    why: str  # the test that has failed; how many have passed

    @property
    def is_caught(self) -> bool:
        return self.kind in (CAUGHT, TIMED_OUT)


def judge(tree: Tree, lines: CoverageMap, file: str, source: bytes, tests: Sequence[str]) -> Verdict:
    """`tests`: by name, the likeliest first. `source`: of `file`, with the fault in it."""
    if not compiles(source):
        return Verdict(STILLBORN, "it does not compile")
    if not tests:
        return Verdict(NOT_RUN, "no test runs this line")
    for some, seconds in stages(lines, tests):
        with tree.holding(file, source):
            limit = 180 + 8 * seconds  # far beyond what they take, on a machine that has become busy too
            found = verdict_of_run(tree.run(some, limit, "-x"), some)
            if found is not None and "::" not in found.why.partition(" ")[0] and not tree.imports():  # no test has failed, but a file
                found = Verdict(STILLBORN, "the package can't be imported")
        if found is not None:
            return found
    return Verdict(SURVIVED, f"{len(tests)} tests pass")


def stages(lines: CoverageMap, tests: Sequence[str]) -> Iterator[tuple[list[str], float]]:
    """Some tests after the other, and how many seconds they take."""
    left = list(tests)
    for limit in (*STAGES, float("inf")):
        some: list[str] = []
        seconds = 0.0
        while left and (not some or seconds + lines.tests[left[0]].seconds <= limit):
            some.append(left.pop(0))
            seconds += lines.tests[some[-1]].seconds
        if some:
            yield some, seconds


def verdict_of_run(run: Run, tests: Sequence[str]) -> Verdict | None:
    """None: all pass."""
    if run.failed:
        name = run.failed[0]
        return Verdict(TIMED_OUT if "Timeout" in run.tests[name].text else CAUGHT, name)
    if run.code == 0 and run.tests.keys() == set(tests):
        return None
    lacking = sorted(set(tests) - run.tests.keys())
    how = "was ended" if run.code is None else f"ended with {run.code}"
    return Verdict(UNCLEAR, f"no test fails, but pytest {how} after {run.seconds:.0f} s, without {len(lacking)} tests: {lacking[:1]}")
