"""The stages' benchmark: what it prints about a small model is what the formulas say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_its_numbers_are_those_of_the_formulas(tmp_path: Path) -> None:
    sizes = ["--width", "32", "--depth", "2", "--heads", "2", "--vocabulary", "64", "--sequence", "8", "--batch", "2"]
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(ROOT / "benchmarks/stages/main.py"),
        *sizes,
        "--micro-batches",
        "2",
        "--output",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert "| stage |" in done.stdout
    found = json.loads((tmp_path / "stages.json").read_text())
    parameters, stages = found["parameters"], found["stages"]
    for stage, whole in (("3", 0), ("2", 2), ("1", 2)):  # bytes a parameter beside those that are divided
        after = stages[stage]["one"]["live"]["after the step"]
        assert after == pytest.approx((whole + 16 / 2) * parameters, rel=0.01)
    travels = 2 * parameters / 2  # bf16, half of it to the other rank
    expected = {"3": (3, 6), "2": (2, 3), "1": (2, 2)}
    for stage, moves in expected.items():
        for micro_batches, times in zip(("one", "several"), moves, strict=True):
            assert stages[stage][micro_batches]["sent"] / travels == pytest.approx(times, rel=0.35), (stage, micro_batches)
