"""Where `export` and `convert` write until their output is whole: nobody else's files are taken away, and one process wins."""

from __future__ import annotations

import errno
import fcntl
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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
        assert f"zero3: another process writes {run.parent / 'out'}; if none does, remove" in capsys.readouterr().err
        assert unfinished(run).is_dir()
    assert main(arguments(name, run)) == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_system_without_locks(name: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert main(arguments(name, run)) == 0
    assert sorted(path.name for path in run.parent.iterdir()) == ["out", "run"]
    shutil.rmtree(run.parent / "out", ignore_errors=True)
    (run.parent / "out").unlink(missing_ok=True)
    unfinished(run).mkdir()
    (unfinished(run) / ".zero3").touch()  # of a process that was killed, or of one that writes
    assert main(arguments(name, run)) == 1
    assert "if none does, remove" in capsys.readouterr().err


def test_a_place_that_is_a_link_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / "empty").mkdir()
    (run.parent / "out").symlink_to("empty")
    assert main(arguments("export", run)) == 1
    assert "out is a symbolic link: name the place that it leads to" in capsys.readouterr().err


@pytest.mark.slow
def test_of_several_at_once_one_wins(run: Path) -> None:
    command = [sys.executable, "-m", "zero3", *arguments("export", run)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ended = [(process.communicate()[1], process.returncode) for process in processes]
    assert sum(code == 0 for _, code in ended) == 1, ended
    for said, code in ended:
        assert code == 0 or "another process" in said or "is not empty" in said or "is there already, where" in said
    assert sorted(path.name for path in run.parent.iterdir()) == ["out", "run"]
