"""A process with the simulated device, which runs tests for `relay`. The device is imported first of all: before pytest, and torch.

Node ids come in on stdin, one a line; reports go out as lines of JSON through the file descriptor that is the argument. Processes
that a test starts import this module too (as `__mp_main__`), so they have a device as well.
"""

from tests.device import simulated

import json  # isort: skip
import os  # isort: skip
import sys  # isort: skip
from typing import Any  # isort: skip

import pytest  # isort: skip

__all__ = ["simulated"]


class _Reporter:
    def __init__(self, descriptor: int) -> None:
        self._out = os.fdopen(descriptor, "w", buffering=1)

    def _send(self, nodeid: str, report: Any) -> None:
        self._out.write(json.dumps([nodeid, report]) + "\n")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._send(report.nodeid, self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._send("", str(report.longrepr))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._send(nodeid, None)

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config


if __name__ == "__main__":
    nodes = sys.stdin.read().splitlines()
    code = pytest.main(["-p", "no:cacheprovider", "-q", *nodes], plugins=[_Reporter(int(sys.argv[1]))])
    sys.stdout.flush()
    os._exit(code)  # without waiting for threads of ranks that a test has left behind
