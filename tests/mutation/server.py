"""Runs pytest in forks of a process that has imported what takes long to import, and nothing of the package.

A job is a line of JSON on standard input, and so is the answer: pytest's exit code, or null if it was ended because it took too long.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.mutation.tree import COMMON

# What tests import, or an optimizer's first step does: in this process, and in the one that makes ranks for tests/support/processes.py.
SLOW_IMPORTS = ["pytest", "hypothesis", "torch.distributed", "torch._dynamo"]


class Noted:
    """A plugin: runs the tests that are wanted, in that order, notes what became of each, and tells tracers which one runs."""

    def __init__(self, folder: Path, wanted: list[str]) -> None:
        self._rank = {name: rank for rank, name in enumerate(wanted)}
        self._told = (folder / "told").open("a")
        self._file = os.open(folder / "number", os.O_RDWR | os.O_CREAT)
        self._number = COMMON
        self._tell(0)

    def _tell(self, number: int) -> None:
        os.pwrite(self._file, number.to_bytes(4, "little"), 0)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self._rank:
            items[:] = sorted((item for item in items if item.nodeid in self._rank), key=lambda item: self._rank[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._note([0, report.nodeid, "failed", 0.0, str(report.longrepr)[-300:]])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._number += 1
        self._tell(self._number)

    def pytest_fixture_setup(self, fixturedef: Any) -> None:
        if fixturedef.scope != "function":
            self._tell(COMMON)

    def pytest_runtest_call(self) -> None:
        self._tell(self._number)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        text = str(report.longrepr)[-300:] if report.failed else ""
        self._note([self._number, report.nodeid, report.outcome, report.duration, text])

    def _note(self, told: list[Any]) -> None:
        self._told.write(json.dumps(told) + "\n")
        self._told.flush()


def run(job: dict[str, Any]) -> int:
    """In the fork: a session of its own, so that all that it starts can be ended with it."""
    os.setsid()
    output = os.open(Path(job["folder"]) / "output", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(job["environment"])
    plugin = Noted(Path(job["folder"]), job["wanted"])
    if "ZERO3_LINES_SEEN" in job["environment"]:
        import sitecustomize  # lines_seen.py

        sitecustomize.begin(job["environment"]["ZERO3_LINES_SEEN"])
        forkserver._forkserver.__init__()  # type: ignore[attr-defined]  # ranks come from one that is traced
    else:
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]  # it is no child of this process
    return int(pytest.main(job["arguments"], plugins=[plugin]))


def ended(process: int, limit: float) -> int | None:
    until, code = time.monotonic() + limit, None
    while time.monotonic() < until:
        over, status = os.waitpid(process, os.WNOHANG)
        if over:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # what it has started, and itself
    if code is None:
        os.waitpid(process, 0)
    maker = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    for rank in Path(f"/proc/{maker}/task/{maker}/children").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(rank), signal.SIGKILL)
    return code


def main() -> None:
    torch.set_num_threads(1)
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    forkserver.set_forkserver_preload(SLOW_IMPORTS)
    forkserver.ensure_running()
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            code = 3  # pytest's own for an error inside
            try:
                code = run(job)
            finally:
                sys.stdout.flush()
                os._exit(code)  # a rank's thread that hangs must not hold it up
        print(json.dumps(ended(process, job["limit"])), flush=True)


if __name__ == "__main__":
    main()
