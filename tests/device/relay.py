"""Tests that need the simulated device run in a process of their own, and are reported here, each as its own item.

torch asks once, when it is imported, whether there is CUDA; a process that has imported torch can't have the device any more. The process
begins with the session, and runs its tests beside all others.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TextIO

import pytest

from tests.device.build import missing

HERE = Path(__file__).parent
_inside = "tests.device.simulated" in sys.modules
_KEY = pytest.StashKey["_Worker"]()


def wants_device(item: pytest.Item) -> bool:
    """Whether the item is for the simulated device: all in this folder, and those for a GPU where there is none."""
    if _inside:
        return False
    import torch

    on_gpu = item.get_closest_marker("gpu") is not None and not torch.cuda.is_available()
    return on_gpu or (HERE in item.path.parents and item.get_closest_marker("no_device") is None)


class _Worker:
    """The process, and what it was asked to run."""

    def __init__(self, nodes: list[str], root: Path) -> None:
        read, write = os.pipe()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path[:1], str(root)]), "TORCH_DISTRIBUTED_DEBUG": "OFF"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.device.worker", str(write)],
            stdin=subprocess.PIPE,
            stdout=self.errors,
            stderr=self.errors,
            pass_fds=[write],
            cwd=root,
            env=environment,
        )
        os.close(write)
        assert self.process.stdin is not None
        self.process.stdin.write("\n".join(nodes).encode())
        self.process.stdin.close()
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        Thread(target=self._read, args=(os.fdopen(read),), daemon=True).start()

    def _read(self, pipe: TextIO) -> None:
        """At once, whoever waits for it: a pipe that is full would stop the process."""
        with pipe:
            for line in pipe:
                self._lines.put(line)
        self._lines.put(None)

    def reports(self, nodeid: str) -> Iterator[Any]:
        """The reports of this item, until it is finished. Raises EOFError if the process ended before."""
        while (line := self._lines.get()) is not None:
            name, report = json.loads(line)
            if name == nodeid and report is None:
                return
            if name == nodeid:
                yield report
            elif not name:
                raise EOFError(report)
        raise EOFError(f"the device's process ended, exit code {self.process.wait()}\n{self._tail()}")

    def _tail(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-8000:]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()


def _outcome(item: pytest.Item, outcome: Any, text: Any) -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, text, "call")


def _reports(item: pytest.Item) -> Iterator[pytest.TestReport]:
    if reason := missing():
        yield _outcome(item, "skipped", (str(item.path), item.location[1], f"Skipped: {reason}"))
        return
    try:
        found = _run(item)
    except (EOFError, pytest.fail.Exception) as failure:  # it has died, or the time limit has come: the rest gets another process
        _end(item.config)
        yield _outcome(item, "failed", str(failure))
        return
    for data in found:
        report = item.config.hook.pytest_report_from_serializable(config=item.config, data=data)
        if report.skipped and isinstance(report.longrepr, list):  # JSON knows no tuple, which pytest's summary wants
            report.longrepr = tuple(report.longrepr)
        yield report


def _run(item: pytest.Item) -> list[Any]:
    """Its reports. If the process dies, the test is tried once more in another one, and this is told: it was seen twice, on a busy machine,
    in a test in which zero3 takes no part.
    """
    stash = item.config.stash
    for tries in (1, 2):
        if _KEY not in stash:
            items = item.session.items
            _begin(item.config, items[items.index(item) :])
        try:
            return [*stash[_KEY].reports(item.nodeid)]
        except EOFError as death:
            if tries == 2:
                raise
            _end(item.config)
            if (terminal := item.config.pluginmanager.get_plugin("terminalreporter")) is not None:
                terminal.write_line(f"\n{item.nodeid} is tried once more: {death}")
    raise AssertionError("unreachable")


def _begin(config: pytest.Config, items: list[pytest.Item]) -> None:
    nodes = [item.nodeid for item in items if wants_device(item)]
    if nodes and not missing():
        config.stash[_KEY] = _Worker(nodes, config.rootpath)


def pytest_runtestloop(session: pytest.Session) -> None:
    if not session.config.option.collectonly and not session.testsfailed:
        _begin(session.config, session.items)


def _end(config: pytest.Config) -> None:
    if (worker := config.stash.get(_KEY, None)) is not None:
        worker.end()
        del config.stash[_KEY]


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not wants_device(item):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        item.ihook.pytest_runtest_logreport(report=report)
    # An item that ran here has left open what it shares with this one, such as the folder.
    item.session._setupstate.teardown_exact(nextitem)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    _end(config)
