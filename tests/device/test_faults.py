"""Waits, holds and orders of docs/design.md's table are taken out, and the device sees it. docs/reliability.md tells what sees what.

One in three is taken out here. `python -m tests.device.faults` takes out all.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.device.fault_list import FAULTS, Fault

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TRIES = 8  # ranks are threads, so what meets what differs from run to run


@pytest.mark.parametrize("fault", FAULTS[::3], ids=lambda fault: fault.name)
def test_fault_is_seen(fault: Fault) -> None:
    from tests.device.faults import first_sight

    assert first_sight(fault, TRIES * [fault.scenario])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_what_a_fault_takes_out_is_there(fault: Fault) -> None:
    assert (ROOT / "zero3" / fault.file).read_text().count(fault.right) == 1


def test_without_a_fault_nothing_is_seen() -> None:
    from tests.device.faults import broken, first_sight

    none = Fault("none", "core/chunk.py", "        now.room = None\n", "        now.room = None\n")
    with broken(none) as scenarios:
        import zero3

        assert scenarios.steps.zero3 is zero3
    assert not first_sight(none, [none.scenario])
