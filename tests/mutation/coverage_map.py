"""Which test file runs which lines of the package. It is made once, by a traced run of each test file, and kept in a file."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutation.places import Place, lines_of_functions
from tests.mutation.tree import Tree, digest, sources, test_files

TRACED_LIMIT = 3600.0  # seconds, of one test file


@dataclass
class CoverageMap:
    """Lines by test file and source. `seconds`: of the traced run. `digest`: of the package's sources that the lines are lines of."""

    digest: str
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> CoverageMap | None:
        if not path.exists():
            return None
        return cls(**json.loads(path.read_text()))

    def save(self, path: Path) -> None:
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(vars(self)))
        unfinished.replace(path)

    def running(self, file: str, source: bytes, place: Place) -> list[str]:
        """Test files that run a line of the place. Those of the source's own room come first, and then the fastest.

        What runs at import runs in all of them. There those count that run a function of the source.
        """
        bodies = lines_of_functions(source)
        wanted = bodies.intersection(range(place.runs[0], place.runs[1] + 1)) or bodies
        found = [test for test, seen in self.lines.items() if not wanted.isdisjoint(seen.get(file, ()))]
        room = file.rpartition("/")[0] or "."
        own = Path(file).stem.strip("_")

        def order(test: str) -> tuple[bool, bool, float]:
            folder = test.removeprefix("tests/").rpartition("/")[0] or "."
            return own not in Path(test).stem, folder != room, self.seconds.get(test, 0.0)

        return sorted(found, key=order)


def build(path: Path, *, anew: bool, only: str = "tests/") -> CoverageMap:
    """Runs what the map at `path` lacks. It is saved after each file, so that a run that was ended goes on where it was.

    `only`: of test files whose paths begin so. The map returned has no others.
    """
    known, now = CoverageMap.load(path), digest(sources())
    found = CoverageMap(now) if anew or known is None or known.digest != now else known
    missing = [test for test in test_files() if test.startswith(only) and test not in found.lines]
    if missing:
        with tempfile.TemporaryDirectory(prefix="mutants-lines-") as place:
            tree = Tree(Path(place))
            shutil.copy(tree.place / "tests/mutation/lines_seen.py", tree.place / "sitecustomize.py")
            for number, test in enumerate(missing, 1):
                began = time.monotonic()
                found.lines[test] = lines_of(tree, test)
                found.seconds[test] = time.monotonic() - began
                total = sum(map(len, found.lines[test].values()))
                print(f"lines: {number}/{len(missing)} {test} runs {total} lines ({found.seconds[test]:.0f} s)", flush=True)
                found.save(path)
    return CoverageMap(found.digest, {test: lines for test, lines in found.lines.items() if test.startswith(only)}, found.seconds)


def lines_of(tree: Tree, test: str) -> dict[str, list[int]]:
    """Of the package, by source, that a test file runs. Whether it passes doesn't matter here: a traced run is slow."""
    with tempfile.TemporaryDirectory(prefix="mutants-seen-") as place:
        seen = Path(place) / "lines"
        tree.run([test], TRACED_LIMIT, first_failure=False, ZERO3_LINES_SEEN=str(seen))
        found: dict[str, set[int]] = {}
        for line in seen.read_text().splitlines() if seen.exists() else ():
            name, _, number = line.rpartition(":")
            found.setdefault(name, set()).add(int(number))
    return {name: sorted(numbers) for name, numbers in sorted(found.items())}
