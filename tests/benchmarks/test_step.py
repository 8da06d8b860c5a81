"""How much code a step runs: few files, all of which docs/design.md names, and as much as it says."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text() for name in ("docs/design.md", "benchmarks/step/README.md")}
COUNTED_ON = (3, 11)  # other versions of Python have other frames for comprehensions


class Step(NamedTuple):
    files: int
    functions: int
    lines: int
    outside: int  # functions with a name outside of comm
    names: list[str]


@cache
def counted() -> dict[str, Step]:
    command = [sys.executable, "benchmarks/step/main.py"]
    environment = os.environ | {"TORCH_DISTRIBUTED_DEBUG": "OFF"}  # as in use: in a process of its own, with nothing around the backend
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    found = {}
    told = r"^(\S+): (\d+) files, (\d+) functions, (\d+) lines;.*\n +outside of comm (\d+) .*\n((?: .*\n)*)"
    for system, *numbers, files in re.findall(told, done.stdout, re.M):
        found[system] = Step(*map(int, numbers), re.findall(r"^ +(\S+\.py) ", files, re.M))
    return found


MOST_FUNCTIONS = 164  # both only shrink
MOST_OUTSIDE_OF_COMM = 132


def test_a_step_of_shard_runs_few_functions() -> None:
    step = counted()["zero3.shard"]
    assert step.files == len(step.names)
    assert step.functions <= MOST_FUNCTIONS
    assert step.outside <= MOST_OUTSIDE_OF_COMM


def test_the_design_page_names_every_file_that_a_step_runs_through() -> None:
    reading = PAGES["docs/design.md"].partition("## What to read")[2].partition("\n## ")[0]
    assert not [name for name in counted()["zero3.shard"].names if f"`{name}`" not in reading]


@pytest.mark.skipif(sys.version_info[:2] != COUNTED_ON, reason="the figures were taken on another version of Python")
def test_the_figures_on_the_pages_are_those_that_are_measured() -> None:
    ours, theirs = counted()["zero3.shard"], counted()["FSDP2"]
    sentence = (
        f"{ours.lines} lines in {ours.functions} functions of {ours.files} files, all of them above. "
        f"FSDP2's runs {theirs.lines} lines in {theirs.functions} functions of {theirs.files} files."
    )
    assert sentence in " ".join(PAGES["docs/design.md"].split())
    for name in ("zero3.shard", "Zero3Sequential", "FSDP2"):
        code = name if name == "FSDP2" else f"`{name}`"
        assert "| {} | {} | {} | {} |".format(code, *counted()[name][:3]) in PAGES["benchmarks/step/README.md"]


def test_it_explains_itself_and_names_the_systems_it_knows(capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module("benchmarks.step.main").main
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    assert "--processes" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["FSDP9"])
    assert "no such system: FSDP9; there are zero3.shard" in capsys.readouterr().err
    assert "benchmarks/step/main.py" in PAGES["benchmarks/step/README.md"]
