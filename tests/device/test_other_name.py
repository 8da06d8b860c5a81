"""The device under a name of its own, in the slot that torch keeps for other makers: nothing in zero3 says "cuda" that need not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.scenarios import SCENARIOS
from tests.device.test_parity import in_order

ROOT = Path(__file__).parents[2]
NAMES = ["bf16", "step_guard", "save_and_load"]


@pytest.mark.slow
def test_under_another_name_the_bits_are_the_same() -> None:
    from tests.device.other_name import digest

    command = [sys.executable, "-m", "tests.device.other_name", *NAMES]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr[-3000:]
    found = sorted(line.split() for line in run.stdout.splitlines() if not line.startswith("a micro-batch"))
    assert found == sorted([name, policy, digest(in_order(SCENARIOS[name]))] for name in NAMES for policy in ("demand", "random"))
