"""Processes with the simulated device, which make runs one after another: torch is imported once in each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any


class Recorder:
    """One process. After an error it is another one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """
        Raises:
            RuntimeError: The run has failed. Its text ends with the error's.
        """
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.race.record", "serve"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None and self._process.stderr is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        if line := self._process.stdout.readline():
            return dict(json.loads(line))
        said = self._process.stderr.read().strip()
        self.end()
        raise RuntimeError(said[-2000:] or "the process ended")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None


class Recorders:
    def __init__(self, number: int) -> None:
        self._free: SimpleQueue[Recorder] = SimpleQueue()
        self._all = [Recorder() for _ in range(number)]
        for each in self._all:
            self._free.put(each)

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        recorder = self._free.get()
        try:
            return recorder.run(asked)
        finally:
            self._free.put(recorder)

    def map(self, function: Any, each: Iterable[Any]) -> Iterator[Any]:
        """Of each, in order; as many at once as there are processes."""
        with ThreadPoolExecutor(len(self._all)) as pool:
            yield from pool.map(function, each)

    def end(self) -> None:
        for each in self._all:
            each.end()


@contextmanager
def recorders(number: int) -> Iterator[Recorders]:
    made = Recorders(number)
    try:
        yield made
    finally:
        made.end()
