"""`Traffic`: what is written to the disk, and when."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from zero3.offload.traffic import Traffic


class Told:
    """Stands for a `Visit`."""

    def __init__(self, log: list[str], was_away: bool = False, name: str = "") -> None:
        self._log, self._was_away, self._name = log, was_away, name
        self.may_write = threading.Event()
        self.may_write.set()
        self.error: OSError | None = None

    def bring(self) -> bool:
        self._log.append(f"bring{self._name}")
        return self._was_away

    def let_go(self) -> None:
        self._log.append(f"let go{self._name}")

    def write(self) -> None:
        self.may_write.wait()
        if self.error is not None:
            raise self.error
        self._log.append(f"write{self._name}")


def make(traffic: Traffic, visit: Any) -> Future[None]:
    traffic.bring(visit).result()
    return traffic.let_go(visit)


def end(traffic: Traffic) -> None:
    """The end of a step, and of its writing."""
    traffic.end_step().result()
    for future in traffic._writing:
        future.result()


def test_nothing_is_written_until_memory_is_short_and_no_longer_than_that() -> None:
    traffic, counts = Traffic(), []
    for away in [(0, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 0), (1, 0, 0)]:
        log: list[str] = []
        for one in away:
            make(traffic, Told(log, bool(one)))
        end(traffic)
        counts.append(log.count("write"))
        assert log.count("bring") == log.count("let go") == 3
    # from the first that had been dropped; then for a whole step, which shows whether it still happens
    assert counts == [0, 2, 3, 0, 3]


def test_what_waits_for_the_disk_is_bounded() -> None:
    traffic, log = Traffic(), list[str]()
    visits = [Told(log, True, f" {number}") for number in range(3)]
    for visit in visits:
        visit.may_write.clear()
    for visit in visits[:2]:
        make(traffic, visit)
    third = traffic.bring(visits[2])  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        third.result(timeout=0.1)
    assert "bring 2" not in log
    visits[0].may_write.set()
    third.result()
    assert log[-2:] == ["write 0", "bring 2"]
    for visit in visits:
        visit.may_write.set()


def test_a_disk_that_fails_is_an_error_of_the_step_and_of_all_later_ones() -> None:
    traffic, visit = Traffic(), Told([], True)
    visit.error = OSError("gone")
    make(traffic, visit)
    for _ in range(3):
        with pytest.raises(OSError, match="gone"):
            traffic.land()
        with pytest.raises(OSError, match="gone"):
            make(traffic, Told([]))
        traffic.end_step().result()


def test_a_disk_that_has_failed_is_an_error_although_few_wait_for_it() -> None:
    """As soon as it is known, and at the latest when the number of those that wait is at its bound."""
    traffic, visit = Traffic(), Told([], True)
    visit.error = OSError("gone")
    make(traffic, visit)
    with pytest.raises(OSError, match="gone"):
        _ = [make(traffic, Told([])) for _ in range(2)]


def test_landing_waits_for_all_writes() -> None:
    traffic, log = Traffic(), list[str]()
    visits = [Told(log, True, f" {number}") for number in range(2)]
    visits[0].may_write.clear()
    for visit in visits:
        make(traffic, visit)
    threading.Timer(0.05, visits[0].may_write.set).start()
    traffic.land()
    assert log[-2:] == ["write 0", "write 1"]
