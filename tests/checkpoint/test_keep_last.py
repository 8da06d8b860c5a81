"""`keep_last` and `latest_checkpoint`: which checkpoints of a directory stay, and what else lies there."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.checkpoint.test_save_and_load import save
from tests.support import disk
from tests.support.checkpoints import content_of, on_ranks, rewrite
from tests.support.ranks import ThreadCommunicator


def test_keep_last_and_latest_checkpoint(tmp_path: Path) -> None:
    """Newest by their order, not by name; what is not ours is left alone, and so is what is saved elsewhere."""
    (tmp_path / "run" / "mine").mkdir(parents=True)
    (tmp_path / "run" / "mine" / "data.txt").write_text("precious")
    (tmp_path / "run" / "cut off" / "data-0123456789abcdef").mkdir(parents=True)

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        assert zero3.latest_checkpoint(tmp_path / "run") is None
        for name in ("z", "y", "b", "a", "y"):
            zero3.save_checkpoint(tmp_path / "run" / name, model, optimizer, keep_last=2)
            assert zero3.latest_checkpoint(tmp_path / "run") == tmp_path / "run" / name
            here = [path.name for path in (tmp_path / "run").iterdir() if (path / "manifest.json").exists()]
            assert len(here) <= 2, f"rank {group.rank} returned before {here} were pruned"
        zero3.save_checkpoint(tmp_path / "other", model)
        with pytest.raises(ValueError, match="keep_last must be at least 1, found 0"):
            zero3.save_checkpoint(tmp_path / "run" / "c", model, keep_last=0)

    on_ranks(2, body)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a", "mine", "y"]
    assert (tmp_path / "run" / "mine" / "data.txt").read_text() == "precious"


def test_a_checkpoint_that_is_deleted_is_none_from_the_first_moment(tmp_path: Path) -> None:
    """Whoever reads while it goes, or after a deletion that was cut off, must not take it for whole."""
    model, there = solo(), list[bool]()
    zero3.save_checkpoint(tmp_path / "a", model)

    def remove(path: Path) -> None:
        if path.is_relative_to(tmp_path / "a"):
            there.append((tmp_path / "a/manifest.json").exists())
        disk.OPERATIONS["remove"](path)

    with disk.replaced("remove", remove):
        zero3.save_checkpoint(tmp_path / "b", model, keep_last=1)
    assert there and not any(there) and not (tmp_path / "a").exists()


@pytest.mark.parametrize(("keep_last", "kind"), [(1.5, TypeError), (True, TypeError), ("2", TypeError), (0, ValueError), (-1, ValueError)])
@pytest.mark.parametrize("rank", [0, 1])
def test_keep_last_is_refused_before_anything_is_written(keep_last: Any, kind: type[Exception], rank: int, tmp_path: Path) -> None:
    """On every rank, whichever has it."""

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        zero3.save_checkpoint(tmp_path / "first", model, optimizer)
        with pytest.raises(kind, match=rf"rank {rank}: keep_last must be .*, found {keep_last!r}"):
            zero3.save_checkpoint(tmp_path / "second", model, optimizer, keep_last=keep_last if group.rank == rank else 1)
        with pytest.raises(ValueError, match=r"rank 0: keep_last: 1; rank 1: keep_last: 2"):
            zero3.save_checkpoint(tmp_path / "second", model, optimizer, keep_last=1 + group.rank)

    on_ranks(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_save_checkpoint_leaves_other_files_in_the_directory_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    on_ranks(2, partial(save, tmp_path))
    on_ranks(2, partial(save, tmp_path))
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["data", "manifest.json", "notes.txt"]


# -- runs


def solo() -> Any:
    return nn.Sequential(zero3.Zero3Layer(nn.Linear(2, 2)))


def run_of(path: Path) -> Any:
    return content_of(path).get("run")


def without_run(path: Path) -> None:
    """As other systems' checkpoints are converted."""
    rewrite(path, {key: value for key, value in content_of(path).items() if key != "run"})


def test_keep_last_deletes_checkpoints_of_its_own_run_only(tmp_path: Path) -> None:
    first, second = solo(), solo()
    for step in range(4):
        zero3.save_checkpoint(tmp_path / f"long-{step}", first, keep_last=2)
    without_run(tmp_path / "long-2")
    for step in range(3):
        zero3.save_checkpoint(tmp_path / f"tried-{step}", second, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long-2", "long-3", "tried-2"]
    resumed = solo()
    zero3.load_checkpoint(tmp_path / "long-3", resumed)
    zero3.save_checkpoint(tmp_path / "long-4", resumed, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["long-2", "long-4", "tried-2"]
    assert run_of(tmp_path / "long-4") not in (None, run_of(tmp_path / "tried-2"))


@pytest.mark.parametrize("launched", ["none", "", None, "job 7"])
def test_save_checkpoint_finds_the_name_of_its_run(launched: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if launched is not None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launched)

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> list[Any]:
        names = []
        for number, options in enumerate([{}, {}, {"run": "mine"}, {}]):
            zero3.save_checkpoint(tmp_path / str(number), model, optimizer, **options)
            names.append(run_of(tmp_path / str(number)))
        zero3.load_checkpoint(tmp_path / "0", model, optimizer)
        zero3.save_checkpoint(tmp_path / "4", model)
        return [*names, run_of(tmp_path / "4")]

    found = on_ranks(2, body)
    first = found[0][0]
    assert found == [[first] * 2 + ["mine"] * 2 + [first]] * 2
    assert first == "job 7" if launched == "job 7" else len(first) == 16
    again = solo()
    without_run(tmp_path / "3")
    zero3.save_checkpoint(tmp_path / "5", again)
    assert (run_of(tmp_path / "5") == first) == (launched == "job 7")


def test_latest_checkpoint_of_a_run(tmp_path: Path) -> None:
    model = solo()
    for number, run in enumerate(["a", "a", "b", "a"]):
        zero3.save_checkpoint(tmp_path / str(number), model, run=run)
    assert zero3.latest_checkpoint(tmp_path) == zero3.latest_checkpoint(tmp_path, run="a") == tmp_path / "3"
    assert zero3.latest_checkpoint(tmp_path, model=model, run="a") == tmp_path / "3"  # a model of one layer
    assert zero3.latest_checkpoint(tmp_path, run="b") == tmp_path / "2"
    assert zero3.latest_checkpoint(tmp_path, run="c") is None
    next((tmp_path / "3").glob("data-*/model*")).write_bytes(b"cut off")
    assert zero3.latest_checkpoint(tmp_path, run="a") == tmp_path / "1"
    (tmp_path / "1" / "manifest.json").write_text("no manifest")
    assert zero3.latest_checkpoint(tmp_path, run="a") == tmp_path / "0"


@pytest.mark.parametrize(("run", "kind"), [("", ValueError), (7, TypeError), (b"a", TypeError)])
def test_a_run_without_a_name_is_refused(run: Any, kind: type[Exception], tmp_path: Path) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(kind, match=r"rank 1: run must be the name of a run"):
            zero3.save_checkpoint(tmp_path, model, run=run if group.rank else "a")
        with pytest.raises(ValueError, match=r"rank 0: run: 0; rank 1: run: 1"):
            zero3.save_checkpoint(tmp_path, model, run=str(group.rank))
        with pytest.raises(kind, match="run must be the name of a run"):
            zero3.latest_checkpoint(tmp_path, run=run)

    on_ranks(2, body)
    assert not list(tmp_path.iterdir())


def names_in(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir()) if path.exists() else []


class Killed(BaseException):
    pass


CHANGES = ("make_directory", "create", "write", "sync", "sync_directory", "replace", "remove")


@pytest.mark.parametrize("deletes", [False, True])
def test_keep_last_leaves_what_a_save_or_a_deletion_of_another_run_has_left(deletes: bool, tmp_path: Path) -> None:
    """Wherever a process was killed: its own run removes that."""
    model, other, left, number = solo(), solo(), 0, 0
    while True:
        directory = tmp_path / str(number)
        if deletes:
            zero3.save_checkpoint(directory / "cut off", model, run="long")
        with ExitStack() as killing:
            steps = iter(range(number))

            def step(change: Any, *given: Any, steps: Any = steps) -> Any:
                if deletes and not (isinstance(given[0], Path) and given[0].is_relative_to(directory / "cut off")):  # noqa: B023
                    return change(*given)  # of the save that deletes it
                if next(steps, None) is None:  # and nothing after it
                    raise Killed
                return change(*given)

            for change in CHANGES:
                killing.enter_context(disk.replaced(change, partial(step, disk.OPERATIONS[change])))
            try:
                if deletes:
                    zero3.save_checkpoint(directory / "next", model, run="long", keep_last=1)
                else:
                    zero3.save_checkpoint(directory / "cut off", model, run="long")
                break
            except Killed:
                pass
        there = names_in(directory / "cut off")
        zero3.save_checkpoint(directory / "tried", other, run="tried", keep_last=1)
        assert names_in(directory / "cut off") == there
        whole = (directory / "cut off" / "manifest.json").exists()
        zero3.save_checkpoint(directory / "long", model, run="long", keep_last=1)
        assert not there or not (directory / "cut off").exists(), there
        left += bool(there) and not whole
        number += 1
    assert left >= (1 if deletes else 5)
