"""What modules keep beside their tensors (get_extra_state), in checkpoints and Hugging Face files."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.huggingface.test_save_pretrained import contents
from tests.support.checkpoints import assert_same, rewrite
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group

WIDE = 3


class Keeping(nn.Linear):
    """Has numbers, texts and a tensor beside its parameters."""

    def __init__(self, first: int) -> None:
        super().__init__(WIDE, WIDE, dtype=torch.float64)
        self.kept: Any = {"steps": first, "kinds": ("a", None, 1.5), "amax": torch.full((3,), first), 7: [True]}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state


def keeping(first: int, group: ThreadCommunicator) -> nn.Module:
    model = nn.Sequential(nn.ModuleDict({"inner": Keeping(first)}), Keeping(first + 1))
    return zero3.shard(model, [Keeping], process_group=process_group(group))


def kept(model: nn.Module) -> list[Any]:
    return [module.kept for module in model.modules() if isinstance(module, Keeping)]


@pytest.mark.parametrize(("saving", "loading"), [(1, 1), (2, 3), (3, 1)])
def test_save_checkpoint_keeps_extra_state(saving: int, loading: int, tmp_path: Path) -> None:
    """Rank 0's; on every rank that loads, however many there are. With the tensors of `extra` beside it."""
    extra = {"mine": torch.arange(4)}
    run_ranks(saving, lambda group: zero3.save_checkpoint(tmp_path, keeping(10 + 10 * group.rank, group), extra=extra))

    def load(group: ThreadCommunicator) -> Any:
        model = keeping(0, group)
        assert_same(zero3.load_checkpoint(tmp_path, model), extra)
        return kept(model)

    for found in run_ranks(loading, load):
        assert_same(found, [Keeping(10).kept, Keeping(11).kept])
    assert "pickle" not in (tmp_path / "manifest.json").read_text()


@pytest.mark.parametrize(
    "value",
    [{1, 2}, torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.int4), object()],
    ids=["a set", "meta", "int4", "an object"],
)
def test_save_checkpoint_of_extra_state_that_files_can_not_hold(value: Any, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = keeping(0, group)
        kept(model)[0]["odd"] = value
        with pytest.raises(TypeError, match=r"rank 0: .*(0\.inner\._extra_state|int4)"):
            zero3.save_checkpoint(tmp_path / "run", model)
        with pytest.raises(TypeError, match=r"rank 0: .*(extra|int4)"):
            zero3.save_checkpoint(tmp_path / "run", keeping(0, group), extra=[value])

    run_ranks(2, body)
    assert not (tmp_path / "run").exists()


def test_load_checkpoint_of_other_extra_state(tmp_path: Path) -> None:
    """Names that differ are an error."""
    run_ranks(2, lambda group: zero3.save_checkpoint(tmp_path, keeping(10, group)))
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    for change, message in (
        (lambda states: states.pop("1._extra_state"), r"missing: 1\._extra_state"),
        (lambda states: states.update({"2._extra_state": 1}), r"unknown: 2\._extra_state"),
    ):
        rewritten = json.loads(json.dumps(manifest))
        change(rewritten["extra_states"])
        rewrite(tmp_path, rewritten)

        def refused(group: ThreadCommunicator, message: str = message) -> None:
            model = keeping(0, group)
            with pytest.raises(ValueError, match=rf"nothing was loaded\. {message}"):
                zero3.load_checkpoint(tmp_path, model)
            assert kept(model)[0]["steps"] == 0

        run_ranks(2, refused)


def test_save_pretrained_and_load_pretrained_keep_extra_state_that_is_a_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files of tensors can hold no other; what is left out is named."""

    def save(group: ThreadCommunicator) -> None:
        model = keeping(0, group)
        model[1].module.kept = torch.arange(3) + group.rank
        zero3.save_pretrained(model, tmp_path)

    with caplog.at_level(logging.WARNING, "zero3"):
        run_ranks(2, save)
    assert_same(contents(tmp_path)["1._extra_state"], torch.arange(3))
    assert "0.inner._extra_state" not in contents(tmp_path)
    assert [r.getMessage() for r in caplog.records if "safetensors files hold tensors only" in r.getMessage()] == [
        "save_pretrained: safetensors files hold tensors only, so this extra state of modules is not in them: 0.inner._extra_state"
    ]

    def load(group: ThreadCommunicator) -> Any:
        model = keeping(5, group)
        zero3.load_pretrained(model, tmp_path)
        return kept(model)

    for inner, outer in run_ranks(2, load):
        assert_same(outer, torch.arange(3))
        assert inner["steps"] == 5
