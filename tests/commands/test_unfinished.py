"""Where `export` and `convert` write until their output is whole: nobody else's files are taken away, and one process wins."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zero3
from zero3.__main__ import main

COMMANDS = {"export": (), "convert": ("--to", "torch"), "dcp": ("--to", "dcp")}
KILLED = """
import os, signal, sys
from pathlib import Path
from zero3.__main__ import main
os.fsync = lambda descriptor: os.kill(os.getpid(), signal.SIGKILL)
main(sys.argv[1:])
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    zero3.save_checkpoint(tmp_path / "run", zero3.shard(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.nn.Linear))
    return tmp_path / "run"


def arguments(name: str, run: Path) -> list[str]:
    return ["export" if name == "export" else "convert", str(run), str(run.parent / "out"), *COMMANDS[name]]


def unfinished(run: Path) -> Path:
    return run.parent / "out.unfinished"


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_killed_process_left_is_taken_away(name: str, run: Path) -> None:
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments(name, run)], capture_output=True).returncode == -9
    assert unfinished(run).is_dir() and not (run.parent / "out").exists()
    assert main(arguments(name, run)) == 0
    assert sorted(path.name for path in run.parent.iterdir()) == ["out", "run"]


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("name", COMMANDS)
def test_what_somebody_else_has_there_stays(name: str, kind: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = unfinished(run)
    if kind == "directory":
        own.mkdir()
        own = own / "work"
    own.write_text("of a week")
    assert main(arguments(name, run)) == 1
    assert "out.unfinished is there already, where" in capsys.readouterr().err
    assert own.read_text() == "of a week" and not (run.parent / "out").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_one_process_writes_at_a_time(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unfinished(run).mkdir()
    with (unfinished(run) / ".zero3").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert main(arguments(name, run)) == 1
        assert capsys.readouterr().err == f"zero3: another process writes {run.parent / 'out'}\n"
        assert unfinished(run).is_dir()
    assert main(arguments(name, run)) == 0


@pytest.mark.slow
def test_of_several_at_once_one_wins(run: Path) -> None:
    command = [sys.executable, "-m", "zero3", *arguments("export", run)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ended = [(process.communicate()[1], process.returncode) for process in processes]
    assert sum(code == 0 for _, code in ended) == 1, ended
    for said, code in ended:
        assert code == 0 or "another process" in said or "is not empty" in said or "is there already, where" in said
    assert sorted(path.name for path in run.parent.iterdir()) == ["out", "run"]
