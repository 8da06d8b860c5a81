"""Saves that fail at every single file operation, on any rank: what was there before still loads, and the next save works."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support import disk
from tests.support.checkpoints import OPTIMIZERS, assert_same, train
from tests.support.processes import PROMPT, Rank, try_on_ranks
from tests.support.ranks import RanksDisagree, ThreadCommunicator, run_ranks


class Killed(BaseException):
    """In place of a process's death: nothing after it has any effect on files."""


class Faults:
    """Numbers the file operations of each rank, and lets one of them fail."""

    def __init__(self) -> None:
        self.log: list[tuple[int, int, str]] = []  # rank, its number, what
        self.at: tuple[int, int] | None = None
        self.make: Callable[[str], BaseException] = Killed
        self._thread = threading.local()

    def begin(self, rank: int) -> None:
        self._thread.rank, self._thread.count, self._thread.dead = rank, 0, False

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*given: Any) -> Any:
            if not hasattr(self._thread, "rank"):
                return function(*given)
            if self._thread.dead:
                raise Killed
            self._thread.count += 1
            self.log.append((self._thread.rank, self._thread.count, name))
            if (self._thread.rank, self._thread.count) == self.at:
                error = self.make(name)
                self._thread.dead = isinstance(error, Killed)
                if name == "write":  # half of it is there
                    function(given[0], [given[1][0][: len(given[1][0]) // 2]])
                raise error
            return function(*given)

        return operation


@pytest.fixture
def faults() -> Iterator[Faults]:
    found = Faults()
    with ExitStack() as replaced:
        for name, operation in disk.OPERATIONS.items():
            replaced.enter_context(disk.replaced(name, found.wrap(name, operation)))
        yield found


def small() -> nn.Module:
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 3), nn.Linear(3, 7)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return model


def sharded(group: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = zero3.shard(small(), nn.Linear, process_group=group)
    return model, OPTIMIZERS["AdamW"](zero3.get_trainable_chunk(model))


def saved(directory: Path) -> None:
    """`run/a`, and `run/b` after one more step."""

    def body(group: ThreadCommunicator) -> None:
        model, optimizer = sharded(group)
        for step, name in enumerate("ab"):
            train(model, optimizer, [step])
            zero3.save_checkpoint(directory / name, model, optimizer, extra={"step": step})

    run_ranks(2, body)


def save_again(directory: Path, faults: Faults | None = None) -> list[BaseException | None]:
    """Another step, saved over `b` with `keep_last=1`, so that `a` is deleted; how it ended on each rank."""
    outcomes: list[BaseException | None] = [None, None]

    def body(group: ThreadCommunicator) -> None:
        model, optimizer = sharded(group)
        zero3.load_checkpoint(directory / "b", model, optimizer)
        train(model, optimizer, [2])
        if faults is not None:
            faults.begin(group.rank)
        try:
            zero3.save_checkpoint(directory / "b", model, optimizer, extra={"step": 2}, keep_last=1)
        except BaseException as error:
            outcomes[group.rank] = error
            if isinstance(error, Killed):
                group.world.fail(error)  # as the others of a process group notice

    run_ranks(2, body)
    return outcomes


def loaded(path: Path) -> tuple[int, Any]:
    """By three ranks: the step, and everything else."""

    def body(group: ThreadCommunicator) -> tuple[int, Any]:
        model, optimizer = sharded(group)
        step = zero3.load_checkpoint(path, model, optimizer)["step"]
        return step, [zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, optimizer)]

    return run_ranks(3, body)[0]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any]]:
    """A directory with two checkpoints, and what should be loaded after each step."""
    directory = tmp_path_factory.mktemp("start")
    saved(directory)
    expected = dict([loaded(directory / "a"), loaded(directory / "b")])
    again = tmp_path_factory.mktemp("again")
    shutil.copytree(directory, again, dirs_exist_ok=True)
    save_again(again)
    return directory, expected | dict([loaded(again / "b")])


def entries(directory: Path) -> list[str]:
    return sorted(path.name.partition("-")[0] for path in directory.rglob("*"))


@contextmanager
def attempt(start: tuple[Path, dict[int, Any]], directory: Path) -> Iterator[Path]:
    """A fresh copy to fail in; afterwards a complete checkpoint is there, and the next save succeeds and tidies up."""
    shutil.copytree(start[0], directory)
    yield directory
    step, found = loaded(directory / "b")
    assert step in (1, 2)
    assert_same(found, start[1][step])
    newest = zero3.latest_checkpoint(directory)
    assert newest == directory / "b"
    if step == 1:
        assert save_again(directory) == [None, None]
        step, found = loaded(directory / "b")
        assert step == 2
        assert_same(found, start[1][2])
        assert entries(directory) == ["b", "data", "manifest.json", "model", "model", "optimizer", "optimizer"]
    shutil.rmtree(directory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["killed", "no space", "input/output error"])
def test_save_checkpoint_that_fails_at_any_file_operation(
    kind: str, faults: Faults, start: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    with attempt(start, tmp_path / "clean") as directory:
        assert save_again(directory, faults) == [None, None]
        assert zero3.latest_checkpoint(directory) == directory / "b"
        assert not (directory / "a").exists()
    operations, faults.log = faults.log, []
    assert {"make_directory", "create", "write", "sync", "sync_directory", "replace", "remove"} <= {name for _, _, name in operations}
    assert len(operations) > 25
    numbers = {"no space": errno.ENOSPC, "input/output error": errno.EIO}
    faults.make = lambda name: OSError(numbers[kind], os.strerror(numbers[kind])) if kind in numbers else Killed()
    failed = 0
    for number, at in enumerate((rank, count) for rank, count, _ in operations):
        faults.at = at
        with attempt(start, tmp_path / str(number)) as directory:
            outcomes = save_again(directory, faults)
            faults.at = None
        first, *others = outcomes
        if kind == "killed":
            assert isinstance(outcomes[at[0]], Killed)
            other = outcomes[1 - at[0]]
            assert other is None or isinstance(other, RanksDisagree | RuntimeError), other
        elif first is not None or others != [None]:
            failed += 1
            assert all(isinstance(error, OSError) and str(error) == str(first) for error in outcomes), outcomes
            assert f"rank {at[0]}: " in str(first) and os.strerror(numbers[kind]) in str(first)
    if kind != "killed":
        assert failed > 20, "only what is cleaned up afterwards may fail without an error"


def test_save_checkpoint_in_the_background_fails_when_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, start: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    """The write fails in its thread, the step goes on, and all ranks hear of it at `wait()`."""
    directory = tmp_path / "run"
    shutil.copytree(start[0], directory)

    def full(*given: Any) -> None:
        assert threading.current_thread().name == "zero3.save_checkpoint"
        raise OSError(errno.ENOSPC, "full")

    def body(group: ThreadCommunicator) -> None:
        model, optimizer = sharded(group)
        zero3.load_checkpoint(directory / "b", model, optimizer)
        saving = zero3.save_checkpoint(directory / "b", model, optimizer, background=True)
        train(model, optimizer, [5])
        with pytest.raises(OSError, match=r"rank 0: .*full"):
            saving.wait()

    with disk.replaced("write", full):
        run_ranks(2, body)
    step, found = loaded(directory / "b")
    assert_same(found, start[1][step])


def die_while_saving(rank: Rank, directory: str, victim: int, operation: str, count: int) -> str:
    """In a process of its own, with a real death."""
    model, optimizer = sharded(None)
    zero3.load_checkpoint(Path(directory) / "b", model, optimizer)
    train(model, optimizer, [2])
    seen = 0

    def dying(*given: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return disk.OPERATIONS[operation](*given)

    try:
        with disk.replaced(operation, dying) if rank.number == victim else nullcontext():
            zero3.save_checkpoint(Path(directory) / "b", model, optimizer, extra={"step": 2}, keep_last=1)
    except RuntimeError as error:
        return str(error)
    return "saved"


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "operation", "count"), [(1, "write", 2), (0, "replace", 1), (0, "sync_directory", 4)])
def test_latest_checkpoint_of_a_process_killed_in_save_checkpoint(
    victim: int, operation: str, count: int, start: tuple[Path, dict[int, Any]], tmp_path: Path
) -> None:
    """The others get the process group's error, at once; what is there is complete."""
    with attempt(start, tmp_path / "run") as directory:
        outcomes = try_on_ranks(2, die_while_saving, str(directory), victim, operation, count, fresh=True)
        assert outcomes[victim].error == "killed"
        assert "rank" in outcomes[1 - victim].value and outcomes[1 - victim].seconds < PROMPT
