"""Mistakes with `save_checkpoint` and `load_checkpoint`: the same error on all ranks, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.checkpoint.test_save_and_load import save
from tests.support.checkpoints import assert_same, odd, on_ranks, train
from tests.support.ranks import ThreadCommunicator


@pytest.mark.parametrize(
    "value",
    [object(), {1, 2}, lambda: 0, torch.float32, {"deep": [1, ({"er": b"x"},)]}, Path("a"), 1j],
    ids=lambda value: type(value).__name__,
)
def test_save_checkpoint_refuses_what_only_pickle_could_hold(value: Any, tmp_path: Path) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(TypeError, match=r"extra.* is a .*never a pickle"):
            zero3.save_checkpoint(tmp_path / "a", model, optimizer, extra=value if group.rank == 0 else None)

    on_ranks(2, body)
    assert not list(tmp_path.iterdir())


class Keeps(torch.optim.SGD):
    """A state under the key that it is told."""

    def __init__(self, params: Any, key: object) -> None:
        super().__init__(params, lr=0.1)
        self.key = key

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter][self.key] = torch.zeros_like(parameter)


@pytest.mark.parametrize("key", ["a:b", 3])
def test_a_state_that_no_name_can_stand_for_is_refused(key: object, tmp_path: Path) -> None:
    model = zero3.Zero3Sequential([zero3.Zero3Layer(nn.Linear(2, 2))])
    optimizer = Keeps(model.get_trainable_chunk(), key)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with pytest.raises(TypeError, match=f"{key!r} of 0.*must be a string without a colon"):
        zero3.save_checkpoint(tmp_path / "a", model, optimizer)
    assert not (tmp_path / "a" / "manifest.json").exists()


def test_save_checkpoint_and_load_checkpoint_mistakes_are_everybodys(tmp_path: Path) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"s3://bucket/run: fsspec paths are not supported"):
            zero3.save_checkpoint("s3://bucket/run", model)
        with pytest.raises(ValueError, match=r"ranks differ in save_checkpoint: rank 0: path: .*zero; rank 1: path: .*one"):
            zero3.save_checkpoint(tmp_path / ("one" if group.rank else "zero"), model)
        with zero3.full_params(model), pytest.raises(RuntimeError, match=r"save_checkpoint inside full_params"):
            zero3.save_checkpoint(tmp_path, model)
        zero3.save_checkpoint(tmp_path, model)
        with pytest.raises(ValueError, match=r"was saved without an optimizer: load it without one"):
            zero3.load_checkpoint(tmp_path, model, optimizer)
        with zero3.full_params(model), pytest.raises(RuntimeError, match=r"load_checkpoint inside full_params"):
            zero3.load_checkpoint(tmp_path, model)

    on_ranks(2, body)


EMPTY: dict[str, Callable[[Any, Any], Any]] = {
    "save_checkpoint": lambda model, optimizer: zero3.save_checkpoint("", model, optimizer),
    "load_checkpoint": lambda model, optimizer: zero3.load_checkpoint("", model, optimizer),
    "latest_checkpoint": lambda model, optimizer: zero3.latest_checkpoint("", model=model),
    "latest_checkpoint of one process": lambda model, optimizer: zero3.latest_checkpoint(""),
    "save_pretrained": lambda model, optimizer: zero3.save_pretrained(model, ""),
    "save_merged": lambda model, optimizer: zero3.save_merged(model, ""),
    "load_pretrained": lambda model, optimizer: zero3.load_pretrained(model, ""),
}


@pytest.mark.parametrize("function", EMPTY)
def test_an_empty_path_is_not_the_working_directory(function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match="the path is an empty text"):
            EMPTY[function](model, optimizer)

    on_ranks(2, body)
    assert not [*tmp_path.iterdir()]


ONE_RANKS: dict[str, tuple[Callable[[Path, Any, Any, bool], Any], str]] = {
    "weights": (
        lambda path, model, optimizer, odd: zero3.load_checkpoint(path, model, optimizer, weights=not odd),
        "ranks differ in the checkpoint that load_checkpoint found: rank 0: weights: True; rank 1: weights: False",
    ),
    "path": (lambda path, model, optimizer, odd: zero3.load_checkpoint(None if odd else path, model), "rank 1: .*PathLike.*NoneType"),  # type: ignore[arg-type]
    "directory": (
        lambda path, model, optimizer, odd: zero3.latest_checkpoint(3 if odd else path.parent, model=model),  # type: ignore[arg-type]
        "rank 1: .*PathLike.*int",
    ),
}


@pytest.mark.parametrize("argument", ONE_RANKS)
def test_load_checkpoint_and_latest_checkpoint_with_an_argument_of_one_rank_alone(argument: str, tmp_path: Path) -> None:
    call, message = ONE_RANKS[argument]

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> str:
        zero3.save_checkpoint(tmp_path / "a", model, optimizer)
        train(model, optimizer, range(1))
        before = zero3.full_state_dict(model, rank0_only=False)
        with pytest.raises((ValueError, TypeError), match=message) as raised:
            call(tmp_path / "a", model, optimizer, group.rank == 1)
        assert_same(zero3.full_state_dict(model, rank0_only=False), before)
        return str(raised.value)

    assert len(set(on_ranks(2, body))) == 1


def test_load_checkpoint_refuses_another_model_by_all_names_at_once(tmp_path: Path) -> None:
    on_ranks(2, partial(save, tmp_path))

    def other() -> nn.Module:
        model = odd()
        model.blocks[0].more = nn.Parameter(torch.zeros(2))
        model.blocks[1].idle = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        model.norm.float()
        del model.blocks[2].gain
        model.blocks[2].gain = 1.0
        return model

    message = (
        r"missing: blocks\.0\.more\. unknown: blocks\.2\.gain\. other shapes: blocks\.1\.idle has \(3,\), expected \(4,\)\. "
        r"other dtypes: norm\.weight has float64, expected float32; norm\.bias"
    )

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        before = zero3.full_state_dict(model, rank0_only=False)
        with pytest.raises(ValueError, match=message):
            zero3.load_checkpoint(tmp_path, model, optimizer)
        assert_same(zero3.full_state_dict(model, rank0_only=False), before)

    on_ranks(3, body, build=other)
