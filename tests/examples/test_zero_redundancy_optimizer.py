"""The recipe as an example, run small, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADAM, TORCHS, OURS, SHARDED = (
    "DDP and Adam",
    "DDP and torch's ZeroRedundancyOptimizer",
    "DDP and zero3.ZeroRedundancyOptimizer",
    "zero3.Zero3Sequential and Adam",
)


@pytest.mark.slow
def test_the_recipes_table(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [
        sys.executable,
        str(ROOT / "examples/zero_redundancy_optimizer.py"),
        "--width",
        "400",
        "--layers",
        "6",
        "--output",
        str(report),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISTRIBUTED_DEBUG": "OFF"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert shown.returncode == 0, shown.stderr
    measured = json.loads(report.read_text())
    model = measured[ADAM]["model"]
    assert model == 6 * 4 * (400 * 400 + 400)

    def grown(system: str) -> float:
        return (measured[system]["bytes"]["after step()"] - measured[system]["bytes"]["before step()"]) / model

    assert abs(grown(ADAM) - 2) < 0.01
    assert abs(grown(OURS) - 1) < 0.01  # 2 / W
    assert abs(grown(SHARDED) - 1) < 0.01
    for moment, taken in measured[OURS]["bytes"].items():
        if moment != "the model, wrapped":  # where DDP may not have let go of its first broadcast's copies yet
            assert taken <= measured[TORCHS]["bytes"][moment] + 100, moment
    assert measured[SHARDED]["bytes"]["after step()"] <= 2.01 * model
    sums = [measured[system]["sum"] for system in (ADAM, TORCHS, OURS, SHARDED)]
    assert max(sums) - min(sums) <= 1e-6 * abs(sums[0])
    assert sums[0] == sums[1] == sums[2]
    assert f"| {OURS} |" in shown.stdout
