"""zero3 beside FSDP2 on the simulated GPU: a small model on eight ranks, counted. Nothing here depends on how fast the machine is.

`most` is what zero3 takes, and may only shrink. benchmarks/race has the cells of real sizes.
"""

from __future__ import annotations

from typing import Any

import pytest

MOST = {"launches": 1, "all_gather": 1, "gathered": 1, "copies": 1, "exposed": 1.0}


@pytest.fixture(scope="module")
def steps() -> dict[str, Any]:
    from benchmarks.race.machines import H100
    from benchmarks.race.record import record
    from tests.device.clock import HOSTS, Clocks

    found = {}
    for system, chosen in (("zero3", {}), ("fsdp2", {}), ("plain", {})):
        log = record(system, "small", 1 if system == "plain" else 8, 2, 256, "none", **chosen)
        found[system] = Clocks(H100, HOSTS["free"]).replay(log)[-1]
    return found
