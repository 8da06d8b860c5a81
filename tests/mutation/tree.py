"""A copy of the repository in which faults are put, and what the tests say there."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
EACH_TEST = 60  # seconds, after which a test that hangs fails
PYTEST = ("-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-o", f"timeout={EACH_TEST}")
PRODUCTS = frozenset({"__pycache__", ".git", ".mutants", ".versions", "build", "dist", ".pytest_cache", ".hypothesis"})


class Run(NamedTuple):
    """What pytest said. `failed`: names of tests; `code`: None if it was ended from outside."""

    code: int | None
    failed: tuple[str, ...]
    seconds: float
    text: str

    @property
    def passed(self) -> bool:
        return self.code == 0


class Tree:
    """A copy of what belongs to the repository, in `place`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in names_of_files():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)

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

    def run(self, files: Sequence[str], limit: float, *, first_failure: bool = True, **environment: str) -> Run:
        """The tests in `files`, for at most `limit` seconds."""
        command = [sys.executable, "-B", "-m", "pytest", *PYTEST, *(["-x"] if first_failure else []), *files]
        began = time.monotonic()
        process = subprocess.Popen(
            command, cwd=self.place, env=self._environment(environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            text, _ = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # its ranks too: the group is this session's own
            text, _ = process.communicate()
        lines = [line.removeprefix("FAILED ") for line in text.splitlines() if line.startswith("FAILED ")]
        failed = tuple(line.split(" - ")[0].removeprefix("tests/") for line in lines)
        return Run(code, failed, time.monotonic() - began, text)

    def imports(self) -> bool:
        """Whether the package can be imported at all."""
        done = subprocess.run([sys.executable, "-B", "-c", "import zero3"], cwd=self.place, env=self._environment({}), capture_output=True)
        return done.returncode == 0

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.place), "PYTHONDONTWRITEBYTECODE": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", **more}


@contextmanager
def copied() -> Iterator[Tree]:
    with tempfile.TemporaryDirectory(prefix="mutants-") as place:
        yield Tree(Path(place))


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
