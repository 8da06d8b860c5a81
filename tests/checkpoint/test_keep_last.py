"""`keep_last` and `latest_checkpoint`: which checkpoints of a directory stay, and what else lies there."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.checkpoint.test_save_and_load import save
from tests.support.checkpoints import on_ranks
from tests.support.ranks import ThreadCommunicator
from zero3.checkpoint import file_operations, manifest


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


def test_a_checkpoint_that_is_deleted_is_none_from_the_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads while it goes, or after a deletion that was cut off, must not take it for whole."""
    zero3.save_checkpoint(tmp_path / "a", nn.Sequential(zero3.Zero3Layer(nn.Linear(2, 2))))
    there: list[bool] = []
    remove = file_operations.remove
    monkeypatch.setattr(file_operations, "remove", lambda path: (there.append((tmp_path / "a/manifest.json").exists()), remove(path)))
    manifest.delete(tmp_path / "a")
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
