"""Checkpoints made to harm: what they say is refused by one ValueError on every rank, and leads to no file of others, nor to code."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero3
from tests.checkpoint.test_integrity import MODEL, OPTIMIZER, build, data, is_linear, refused, rewrite
from tests.checkpoint.test_integrity import saved as saved  # a fixture
from tests.support.checkpoints import content_of, on_ranks
from tests.support.ranks import ThreadCommunicator
from zero3.__main__ import main


def link(path: Path, to: Path) -> None:
    """`path` is moved to `to`, and what is in its place leads there."""
    shutil.move(path, to)
    path.symlink_to(to)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


LINKS: dict[str, Callable[[Path, Path], object]] = {
    "the manifest": lambda run, away: link(run / "manifest.json", away / "m"),
    "the data": lambda run, away: link(data(run, ""), away / "d"),
    "a model's file": lambda run, away: link(data(run, MODEL), away / "f"),
    "an optimizer's file": lambda run, away: link(data(run, OPTIMIZER), away / "f"),
    "a link beside it": lambda run, away: link(data(run, MODEL), data(run, "").parent / "other"),
    "a pipe": lambda run, away: pipe(data(run, MODEL)),
}


@pytest.mark.parametrize("name", LINKS)
def test_files_that_lie_elsewhere_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    """The very bytes that were saved, but by way of a link."""
    shutil.copytree(saved / "one", tmp_path / "one")
    (tmp_path / "away").mkdir()
    LINKS[name](tmp_path / "one", tmp_path / "away")
    refused(tmp_path / "one", r"is a link or a device", 2)


def test_load_checkpoint_may_be_given_a_link(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "latest").symlink_to(saved / "one")

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> Any:
        return zero3.load_checkpoint(tmp_path / "latest", model, optimizer)

    assert on_ranks(2, body, build=build, layers=is_linear) == [{"step": 0}] * 2


def test_keep_last_does_not_reach_through_links(saved: Path, tmp_path: Path) -> None:
    """Someone's favourite, kept elsewhere, and a name for the newest: neither is deleted, nor counted."""
    shutil.copytree(saved / "one", tmp_path / "best")
    shutil.copytree(saved / "two", tmp_path / "run" / "a")
    (tmp_path / "debris" / "data-0123456789abcdef").mkdir(parents=True)
    for name, to in (("best", tmp_path / "best"), ("latest", tmp_path / "run" / "a"), ("debris", tmp_path / "debris")):
        (tmp_path / "run" / name).symlink_to(to)

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        for name in "bc":
            zero3.save_checkpoint(tmp_path / "run" / name, model, optimizer, keep_last=2, run=run)

    run = content_of(saved / "two")["run"]
    on_ranks(2, body, build=build, layers=is_linear)
    assert sorted(os.listdir(tmp_path / "run")) == ["b", "best", "c", "debris", "latest"]
    assert (tmp_path / "best" / "manifest.json").is_file() and (tmp_path / "debris" / "data-0123456789abcdef").is_dir()


def test_save_checkpoint_does_not_remove_what_a_link_leads_to(saved: Path, tmp_path: Path) -> None:
    """The data of what is saved over was put elsewhere."""
    shutil.copytree(saved / "one", tmp_path / "one")
    old = data(tmp_path / "one", "")
    link(old, tmp_path / "away")
    kept = sorted(os.listdir(tmp_path / "away"))

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        zero3.save_checkpoint(tmp_path / "one", model, optimizer)
        zero3.load_checkpoint(tmp_path / "one", model, optimizer)

    on_ranks(2, body, build=build, layers=is_linear)
    assert not os.path.lexists(old) and sorted(os.listdir(tmp_path / "away")) == kept


def first(content: dict[str, Any], where: str) -> Any:
    """Some tensor's entry, or the state that most names share."""
    return next(iter(content["tensors"].values())) if where == "tensors" else content["optimizer"]["state"][0]


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an optimizer that is a text": lambda c: c.update(optimizer="AdamW"),
    "an optimizer without groups": lambda c: c["optimizer"].pop("groups"),
    "groups that are numbers": lambda c: c["optimizer"].update(groups=[1, 2]),
    "names that are no texts": lambda c: c["optimizer"]["groups"][0].__setitem__(1, [{}]),
    "options that are a list": lambda c: c["optimizer"]["groups"][0].__setitem__(0, [1]),
    "an option that is no value": lambda c: c["optimizer"]["groups"][0][0].update(lr={"$tensor": ["load", 1, False]}),
    "an option that is half a value": lambda c: c["optimizer"]["groups"][0][0].update(lr={"$tensor": 3}),
    "state of a dtype that is none": lambda c: first(c, "state")[1].update(exp_avg="load"),
    "state of another dtype": lambda c: first(c, "state")[1].update(exp_avg="int8"),
    "state that is not there": lambda c: first(c, "state")[1].update(more="float64"),
    "state of an absurd size": lambda c: first(c, "state")[3].update(rows=["float64", [1 << 50]]),
    "state of a negative size": lambda c: first(c, "state")[3].update(rows=["float64", [-3]]),
    "a number that is none": lambda c: first(c, "state")[2].update(step={"$tensor": ["float32", [[]], False]}),
    "no tensors": lambda c: c.pop("tensors"),
    "tensors in a list": lambda c: c.update(tensors=[]),
    "a tensor without a shape": lambda c: first(c, "tensors").pop("shape"),
    "a tensor that may be stored": lambda c: first(c, "tensors").pop("stored"),
    "a dtype that is a function": lambda c: first(c, "tensors").update(dtype="load"),
    "a file with a negative size": lambda c: c["files"][MODEL].update(bytes=-1, sha256=[]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_manifest_that_was_made_to_harm(name: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "one", tmp_path / "one")
    rewrite(tmp_path / "one", CHANGES[name])
    refused(tmp_path / "one", ".", 2)


@pytest.mark.parametrize("name", CHANGES)
def test_the_command_line_on_a_manifest_that_was_made_to_harm(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shown, or one line that says what is wrong, and nothing left behind."""
    shutil.copytree(saved / "one", tmp_path / "one")
    rewrite(tmp_path / "one", CHANGES[name])
    for command in (["inspect", str(tmp_path / "one")], ["export", str(tmp_path / "one"), str(tmp_path / "out")]):
        code, said = main(command), capsys.readouterr()
        assert (code, said.err) == (0, "") or (code == 1 and said.err.startswith("zero3: ") and said.err.count("\n") == 1)
        assert (tmp_path / "out").exists() == (code == 0 and command[0] == "export")
        assert not (tmp_path / "out.unfinished").exists()


def test_load_checkpoint_of_extra_that_is_none(saved: Path, tmp_path: Path) -> None:
    """Found when it is read, which is after everything else: the model counts as unloaded then."""
    shutil.copytree(saved / "one", tmp_path / "one")
    rewrite(tmp_path / "one", lambda c: c.update(extra={"$items": [[{"$tensor": "../../x"}, 1]]}))

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(RuntimeError, match=r"there is no 'extra:\.\./\.\./x'.*load again"):
            zero3.load_checkpoint(tmp_path / "one", model, optimizer)
        zero3.load_checkpoint(saved / "one", model, optimizer)

    on_ranks(2, body, build=build, layers=is_linear)


def test_load_pretrained_of_an_index_that_leads_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("../secret.safetensors", "/etc/secret.safetensors", "a/b.safetensors", "a\\b.safetensors", "..", "", 3):
        (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"0.weight": name}}))
        with pytest.raises(ValueError, match=r"expected a \.safetensors file beside it"):
            zero3.load_pretrained(zero3.Zero3Layer(torch.nn.Linear(2, 2)), tmp_path / "model")
