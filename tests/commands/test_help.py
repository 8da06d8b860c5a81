"""Every command's `--help`, where torch is all that is installed: nobody should need transformers to read what a benchmark does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = [*ROOT.glob("examples/*.py"), *ROOT.glob("benchmarks/*/main.py"), ROOT / "tests/mutants.py", ROOT / "tests/package.py"]
MODULES = ["zero3", "zero3 inspect", "zero3 export", "tests.soak"]
COMMANDS = [*sorted(path.relative_to(ROOT).as_posix() for path in SCRIPTS), *MODULES]


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """Of all commands, from one process, since to import torch takes seconds."""
    command = [sys.executable, "-m", "tests.support.torch_alone", *COMMANDS, "pytest"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return {answer["command"]: answer for answer in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_torch_alone(command: str, answers: dict[str, dict[str, Any]]) -> None:
    answer = answers[command]
    assert answer["code"] == 0, answer["printed"]
    assert answer["printed"].startswith("usage: ")
    assert len(answer["printed"].splitlines()) > 4, "it says what the command does, and what can be chosen"


@pytest.mark.slow
def test_other_packages_are_out_of_reach_there(answers: dict[str, dict[str, Any]]) -> None:
    assert "ModuleNotFoundError" in answers["pytest"]["printed"]
