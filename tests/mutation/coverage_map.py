"""Which test runs which lines of the package. It is made once, by a traced run of each test file, and kept in files."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tests.mutation.places import Place, function_around, lines_of_functions
from tests.mutation.tree import COMMON, EACH_TEST, Run, Tree, content_of, copied, digest, sources, test_files

TRACED_LIMIT = 3600.0  # seconds, of one test file
LONG = 1.0  # seconds, of one test: of most that start processes
LEFT_OUT = ("tests/benchmarks/", "tests/docs/", "tests/examples/", "tests/mutation/")  # they start programs, or test no code of the package


class Seen(NamedTuple):
    """What one test runs. `lines`: by source, a number whose bits are lines."""

    seconds: float
    lines: dict[str, int]


@dataclass(frozen=True)
class CoverageMap:
    """By name, the tests that pass without a fault, and in far less time than they are given."""

    tests: dict[str, Seen]

    def running(self, file: str, source: bytes, place: Place) -> list[str]:
        """Tests that run a line of the place, the likeliest to see it first.

        That are those that run lines of its function which few tests run; then those that are not LONG, those of the source's own test file
        or room, and the fastest. What runs at import runs in all of them: there those count that run a function of the source.
        """
        wanted = bits(range(place.runs[0], place.runs[1] + 1)) & bits(lines_of_functions(source))
        around = bits(function_around(source, place.line)) if wanted else bits(lines_of_functions(source))
        found = {test: seen for test, seen in self.tests.items() if seen.lines.get(file, 0) & (wanted or around)}
        often: dict[int, int] = {}
        for seen in found.values():
            for line in each_bit(seen.lines[file] & around):
                often[line] = often.get(line, 0) + 1
        room, own = file.rpartition("/")[0] or ".", Path(file).stem.strip("_")

        def order(test: str) -> tuple[float, bool, bool, bool, float]:
            path = test.partition("::")[0]
            folder = path.removeprefix("tests/").rpartition("/")[0] or "."
            rarest = min(often[line] for line in each_bit(found[test].lines[file] & around))
            seconds = found[test].seconds
            return rarest, seconds > LONG, own not in Path(path).stem, folder != room, seconds

        return some_of_each_function_first(sorted(found, key=order))

    def chosen(self, tests: Sequence[str], seconds: float) -> list[str]:
        """For so many seconds in all: half of them for the first of the tests, the other half for as many others as can be."""
        first = self._within(tests, seconds / 2)
        others = sorted(set(tests) - set(first), key=lambda test: (self.tests[test].seconds, test))
        return first + self._within(others, seconds / 2)

    def _within(self, tests: Iterable[str], seconds: float) -> list[str]:
        """One that takes long by itself is passed over where others are left."""
        chosen, spent = [], 0.0
        for test in tests:
            if spent + self.tests[test].seconds <= seconds or not chosen:
                chosen.append(test)
                spent += self.tests[test].seconds
        return chosen

    def of_files(self, paths: Iterable[str]) -> list[str]:
        return [test for path in paths for test in self.tests if test.partition("::")[0] == path]


def some_of_each_function_first(tests: list[str]) -> list[str]:
    """Of a test with many parameters three come first, the others after three of every other test."""
    turns: dict[str, int] = {}
    turn: dict[str, int] = {}
    for test in tests:
        function = test.partition("[")[0]
        turn[test] = turns[function] = turns.get(function, -1) + 1
    return sorted(tests, key=lambda test: turn[test] // 3)


def bits(lines: Iterable[int]) -> int:
    found = 0
    for line in lines:
        found |= 1 << line
    return found


def each_bit(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def build(folder: Path, only: tuple[str, ...], *, slow: bool = False) -> CoverageMap:
    """Runs what the map in `folder` lacks: new test files, changed ones, all if the package has changed.

    Args:
        only: the map has test files whose paths begin so, and no others.
        slow: with tests that are marked so, and the files LEFT_OUT.
    """
    package = digest(sources())
    present = [test for test in test_files() if test.startswith(only) and (slow or not test.startswith(LEFT_OUT))]
    known = {test: folder / (test.replace("/", "-") + ".json") for test in present}
    state = {test: [package, content_of(test), slow] for test in present}
    missing = [test for test in present if not known[test].exists() or json.loads(known[test].read_text())["state"] != state[test]]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with copied() as tree:
            for number, test in enumerate(missing, 1):
                began = time.monotonic()
                seen, failed = lines_of(tree, test, slow)
                tests = {
                    name: [round(each.seconds, 3), {file: hex(lines) for file, lines in each.lines.items()}] for name, each in seen.items()
                }
                known[test].write_text(json.dumps({"state": state[test], "tests": tests}))
                told = f"lines: {number}/{len(missing)} {test}: {len(seen)} tests ({time.monotonic() - began:.0f} s)"
                print(f"{told}{''.join(f'; not used: {name}' for name in failed)}", flush=True)
    return load(known[test] for test in present)


def load(paths: Iterable[Path]) -> CoverageMap:
    read = [json.loads(path.read_text())["tests"] for path in paths]
    every = {name: each for tests in read for name, each in tests.items() if each[0] < EACH_TEST / 5}  # else one may seem to hang
    return CoverageMap(
        {name: Seen(seconds, {file: int(lines, 16) for file, lines in seen.items()}) for name, (seconds, seen) in every.items()}
    )


def lines_of(tree: Tree, file: str, slow: bool = True) -> tuple[dict[str, Seen], list[str]]:
    """What the tests of a file run, and the names of those that fail. A test that fails when it is traced is run once more without."""
    options = () if slow else ("-m", "not slow")
    with tempfile.TemporaryDirectory(prefix="mutants-seen-") as place:
        run = tree.run([file], TRACED_LIMIT, *options, traced=Path(place))
        lines = Path(place) / "lines"
        seen = lines_by_test(lines.read_text().splitlines() if lines.exists() else ())
    again = tree.run(run.failed, TRACED_LIMIT) if run.failed else Run(0, {})
    told = {**run.tests, **again.tests}
    common = seen.get(COMMON, {})
    found = {}
    for name, one in run.tests.items():
        if told[name].outcome == "passed":
            own = seen.get(one.number, {})
            every = {source: own.get(source, 0) | common.get(source, 0) for source in {**own, **common}}
            found[name] = Seen(told[name].seconds, every)
    return found, again.failed


def lines_by_test(lines: Iterable[str]) -> dict[int, dict[str, int]]:
    found: dict[int, dict[str, int]] = {}
    for each in lines:
        number, source, line = each.split()
        of_test = found.setdefault(int(number), {})
        of_test[source] = of_test.get(source, 0) | 1 << int(line)
    return found
