"""A copy of the repository in which faults are put, and what the tests say there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
EACH_TEST = 300  # seconds, after which a test that hangs fails, as without this tool
PYTEST = (
    "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", "-o", f"timeout={EACH_TEST}",
    "--assert=plain", "--hypothesis-profile=no_shrinking",  # nobody reads what they would tell, and it takes long
)  # fmt: skip
COMMON = 1  # what runs in the set-up that tests of a file share; 0: while tests are collected; 2 and more: in tests
PRODUCTS = frozenset({"__pycache__", ".git", ".mutants", ".versions", "build", "dist", ".pytest_cache", ".hypothesis"})


class Told(NamedTuple):
    """What became of one test: `number` in its run."""

    number: int
    outcome: str
    seconds: float
    text: str


class Run(NamedTuple):
    """What pytest said. `code`: None if it was ended from outside; `tests`: by name, those that were run."""

    code: int | None
    tests: dict[str, Told]
    seconds: float = 0.0

    @property
    def failed(self) -> list[str]:
        return [name for name, told in self.tests.items() if told.outcome == "failed"]


class Tree:
    """A copy of what belongs to the repository, in `place`, and a server that runs its tests."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in names_of_files():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
        shutil.copy(place / "tests/mutation/lines_seen.py", place / "sitecustomize.py")
        (place / "tmp").mkdir()
        # by hash: a fault may leave a source's size and second of change as they were
        compiled = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "zero3", "tests"]
        subprocess.run(compiled, cwd=place, check=True)
        self._server = subprocess.Popen(
            [sys.executable, "-B", "-m", "tests.mutation.server"], cwd=place, env=self._environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def close(self) -> None:
        self._server.communicate()

    @contextmanager
    def holding(self, file: str, source: bytes) -> Iterator[None]:
        """Inside, `file` of the package has other contents."""
        path = self.place / "zero3" / file
        right = path.read_bytes()
        path.write_bytes(source)
        try:
            yield
        finally:
            path.write_bytes(right)

    def run(self, tests: Sequence[str], limit: float, *options: str, traced: Path | None = None) -> Run:
        """Tests by name, in their order, or whole files; for at most `limit` seconds. `traced`: a folder for the file `lines`."""
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self.place / "tmp", ignore_cleanup_errors=True) as place:
            folder = traced or Path(place)
            job = {
                "folder": str(folder),
                "wanted": [test for test in tests if "::" in test],
                "arguments": [*PYTEST, f"--basetemp={place}/pytest", *options, *files],
                "environment": {"TMPDIR": place, **({"ZERO3_LINES_SEEN": str(folder)} if traced else {})},
                "limit": limit,
            }
            assert self._server.stdin is not None and self._server.stdout is not None
            print(json.dumps(job), file=self._server.stdin, flush=True)
            code = json.loads(self._server.stdout.readline())
            told = folder / "told"
            return Run(code, joined(told.read_text().splitlines() if told.exists() else ()), time.monotonic() - began)

    def imports(self) -> bool:
        """Whether the package can be imported at all."""
        done = subprocess.run([sys.executable, "-B", "-c", "import zero3"], cwd=self.place, env=self._environment(), capture_output=True)
        return done.returncode == 0

    def _environment(self) -> dict[str, str]:
        fixed = {"PYTHONPATH": str(self.place), "PYTHONDONTWRITEBYTECODE": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "OMP_NUM_THREADS": "1"}
        return {**os.environ, **fixed, "ZERO3_RING_DIR": "0"}  # ranks come from a process that is older than tests/conftest.py's word


def joined(lines: Iterable[str]) -> dict[str, Told]:
    """Set-up, call and tear-down of each test are one: it has failed if one of them has."""
    found: dict[str, Told] = {}
    for line in lines:
        number, name, outcome, seconds, text = json.loads(line)
        before = found.get(name, Told(number, "passed", 0.0, ""))
        worst = max(before.outcome, outcome, key=("passed", "skipped", "failed").index)
        found[name] = Told(number, worst, before.seconds + seconds, before.text or text)
    return found


@contextmanager
def copied() -> Iterator[Tree]:
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as place:
        tree = Tree(Path(place))
        try:
            yield tree
        finally:
            tree.close()


def names_of_files() -> list[str]:
    """What git knows, or would know; in a source distribution, all that is no product of a run."""
    listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    found = [path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file()]
    return [path.as_posix() for path in found if not any(part.startswith(".venv") or part in PRODUCTS for part in path.parts)]


def sources() -> dict[str, bytes]:
    """Of the package, by path below `zero3/`."""
    package = ROOT / "zero3"
    return {path.relative_to(package).as_posix(): path.read_bytes() for path in sorted(package.rglob("*.py"))}


def test_files() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py"))


def content_of(name: str) -> str:
    """A hash of one file of the repository."""
    path = ROOT / name
    return digest({name: path.read_bytes() if path.is_file() else b""})


def digest(contents: dict[str, bytes]) -> str:
    """Of files, names included."""
    known = hashlib.sha256()
    for name, content in contents.items():
        known.update(f"{name} {len(content)}\n".encode() + content)
    return known.hexdigest()[:16]
