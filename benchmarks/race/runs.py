"""A run of the race: what trains where. And processes of their own, in which runs are recorded."""

from __future__ import annotations

import gc
import hashlib
import pickle
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.common.report import progress

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("zero3", "benchmarks/race", "tests/device")  # what a figure depends on, beside torch
RECORD = "benchmarks.race.record"
FULL_BUFFER = "full buffer"  # a mark in a log, before and after memory for one is asked for
LONG = "long"  # what is chosen for long sequences: all ranks share one; the loss without logits, tiles, activations in the host's memory


@dataclass(frozen=True)
class Run:
    """A system that trains a model, on rank 0 of so many. `chosen`: settings of the system (systems.py) and of the loop (record.py)."""

    system: str
    model: str
    ranks: int
    rows: int
    sequence: int
    checkpointing: str = "none"
    chosen: tuple[str, ...] = ()

    @property
    def part(self) -> int:
        """Tokens of a sequence on this rank."""
        return self.sequence // self.ranks if LONG in self.chosen else self.sequence

    @property
    def tokens(self) -> int:
        return self.rows * self.part

    @property
    def cell(self) -> str:
        return f"{self.model.upper()}, {self.ranks}, {self.rows}x{self.sequence}, {self.checkpointing}"

    @property
    def slug(self) -> str:
        return "-".join([self.system, *self.cell.lower().split(", "), *self.chosen])


def digest(root: Path = ROOT) -> str:
    """Of all that figures depend on: the sources, torch. A figure that was kept under another one is not read again."""
    found = hashlib.sha256(version("torch").encode())
    for path in _sources(root):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()[:12]


def _sources(root: Path) -> Iterable[Path]:
    suffixes = (".py", ".h", ".cpp")
    return sorted(path for folder in SOURCES for path in (root / folder).rglob("*") if path.suffix in suffixes and "test_" not in path.name)


def apart(name: str, run: Run) -> Any:
    """What the function of that name in record.py makes of the run, in a process of its own with the simulated device.

    Raises:
        Exception: As the function does. An error of this process says which run ended it.
    """
    processes = get_context("forkserver")
    processes.set_forkserver_preload([RECORD])  # imports are made once
    with ProcessPoolExecutor(1, mp_context=processes) as one:
        return one.submit(_called, name, run).result()


def kept(name: str, run: Run, folder: Path) -> Any:
    """As `apart`, once for each state of all sources: so a race that was ended goes on where it was."""
    file = folder / "runs" / digest() / f"{run.slug}.{name}"
    if file.exists():
        return pickle.loads(file.read_bytes())
    found = apart(name, run)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as scratch:
        scratch.write(pickle.dumps(found))
    Path(scratch.name).replace(file)
    progress(f"{run.slug}: {name}")
    return found


def _called(name: str, run: Run) -> Any:
    gc.freeze()  # what was imported stays: collections need not look at it
    return getattr(import_module(RECORD), name)(run)
