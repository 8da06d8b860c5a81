"""Files that are not what was saved: refused on every rank by one error that names the file, before anything changes."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.checkpoints import assert_same, on_ranks, train
from tests.support.ranks import ThreadCommunicator

MODEL, OPTIMIZER = "model-00001-of-00002.safetensors", "optimizer-00000-of-00002.safetensors"


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 7)])
        return nn.Sequential(nn.Embedding(7, 5), *layers).double()


def is_linear(name: str, module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of two ranks, of the same model one step apart."""
    directory = tmp_path_factory.mktemp("saved")

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        for step, name in enumerate(("one", "two")):
            train(model, optimizer, [step])
            zero3.save_checkpoint(directory / name, model, optimizer, extra={"step": step})

    on_ranks(2, body, build=build, layers=is_linear)
    return directory


def data(directory: Path, name: str) -> Path:
    return next(directory.glob("data-*")) / name


def refused(directory: Path, message: str, world_size: int) -> None:
    """By all ranks with the same words, and the model is what it was."""

    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> str:
        train(model, optimizer, [5])
        before = zero3.full_state_dict(model, rank0_only=False), zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        generator = torch.get_rng_state()
        with pytest.raises(ValueError, match=message) as raised:
            zero3.load_checkpoint(directory, model, optimizer)
        after = zero3.full_state_dict(model, rank0_only=False), zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        assert_same(after, before)
        assert torch.equal(torch.get_rng_state(), generator)
        return str(raised.value)

    assert len(set(on_ranks(world_size, body, build=build, layers=is_linear))) == 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def make_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip(where: float) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[round(where * (len(content) - 1))] ^= 1
        path.write_bytes(content)

    return change


def swap(path: Path) -> None:
    other = path.with_name(path.name.replace("00001-of", "0000X-of").replace("00000-of", "00001-of").replace("0000X-of", "00000-of"))
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def pickled(path: Path) -> None:
    path.write_bytes(pickle.dumps({"a": 1}).ljust(path.stat().st_size, b"\0"))


CHANGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate, "longer": lengthen, "empty": empty, "swapped": swap, "a pickle": pickled,
    "first bit": flip(0), "a bit of the header": flip(0.1), "a bit in the middle": flip(0.6), "last bit": flip(1),
    "missing": Path.unlink, "a directory": make_a_directory,
}  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", [MODEL, OPTIMIZER])
@pytest.mark.parametrize("change", CHANGES)
def test_load_checkpoint_of_a_file_that_was_changed(change: str, name: str, world_size: int, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "one", tmp_path / "one")
    CHANGES[change](data(tmp_path / "one", name))
    # of two swapped files either may be named
    named = re.escape(name) if change != "swapped" else name.partition("-")[0] + r"-0000[01]-of-00002\.safetensors"
    refused(tmp_path / "one", rf"{named}\b.* (corrupt|bytes|missing)", world_size)


def test_load_checkpoint_with_a_file_of_another_checkpoint(saved: Path, tmp_path: Path) -> None:
    """Well-formed, of the same names, shapes and size."""
    shutil.copytree(saved / "one", tmp_path / "one")
    target, source = data(tmp_path / "one", MODEL), data(saved / "two", MODEL)
    assert target.stat().st_size == source.stat().st_size
    shutil.copyfile(source, target)
    refused(tmp_path / "one", rf"{re.escape(MODEL)} is corrupt: its bytes 0 to \d+ are not what was saved", 2)


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", "weights.pt"])
def test_load_checkpoint_with_a_foreign_file(name: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "one", tmp_path / "one")
    data(tmp_path / "one", name).write_bytes(b"")
    refused(tmp_path / "one", rf"{re.escape(name)} does not belong to this checkpoint", 2)


def test_no_bit_of_the_manifest_goes_unnoticed(saved: Path, tmp_path: Path) -> None:
    """Of a load by one rank for each bit; and a load of one of them by all ranks."""
    model = zero3.shard(build(), is_linear)
    shutil.copytree(saved / "one", tmp_path / "one")
    path = tmp_path / "one" / "manifest.json"
    original = path.read_bytes()
    plain = json.loads(original)
    for place in range(0, len(original), 7):
        changed = bytearray(original)
        changed[place] ^= 1 << place % 8
        try:
            if json.loads(bytes(changed)) == plain:
                continue  # white space
        except ValueError:
            pass
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"manifest\.json"):
            zero3.load_checkpoint(tmp_path / "one", model)
    refused(tmp_path / "one", r"manifest\.json", 2)
    path.write_bytes(original[: len(original) // 2])
    refused(tmp_path / "one", r"manifest\.json is corrupt", 2)
    path.unlink()
    refused(tmp_path / "one", r"one is no checkpoint: there is no manifest\.json in it \(found data-", 2)
    refused(tmp_path / "nowhere", r"nowhere is no checkpoint", 2)


def rewrite(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """By somebody who knows how to hash."""
    path = directory / "manifest.json"
    content = json.loads(path.read_text())
    del content["sha256"]
    change(content)
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(content))


ESCAPES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a file above": (lambda c: c["files"].update({"../model.safetensors": c["files"][MODEL]}), r"names the file '\.\./model"),
    "an absolute file": (lambda c: c["files"].update({"/etc/passwd": c["files"][MODEL]}), r"names the file '/etc/passwd'"),
    "a pickle": (lambda c: c["files"].update({"model.pt": c["files"][MODEL]}), r"names the file 'model\.pt'"),
    "data above": (lambda c: c.update(data="../two"), r"data '\.\./two'"),
    "data elsewhere": (lambda c: c.update(data="/tmp"), r"data '/tmp'"),
    "no data": (lambda c: c.pop("data"), r"data None"),
    "too few hashes": (lambda c: c["files"][MODEL].update(sha256=[]), r"has 0 hashes"),
    "another format": (lambda c: c.update(format="x"), r"is not the manifest of a zero3 checkpoint"),
    "a later version": (lambda c: c.update(version=2), r"has version 2, this zero3 reads 1"),
}


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_manifest_can_not_lead_elsewhere(escape: str, saved: Path, tmp_path: Path) -> None:
    change, message = ESCAPES[escape]
    shutil.copytree(saved / "one", tmp_path / "one")
    rewrite(tmp_path / "one", change)
    refused(tmp_path / "one", message, 2)


def test_load_checkpoint_by_ranks_that_see_different_ones(saved: Path) -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer, group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"ranks differ in the checkpoint that load_checkpoint found"):
            zero3.load_checkpoint(saved / ("one" if group.rank else "two"), model, optimizer)

    on_ranks(2, body, build=build, layers=is_linear)
