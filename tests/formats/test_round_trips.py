"""A checkpoint of ours to each format and back: every bit is there again, whatever the ranks, before and after."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.checkpoints import LAYERS, OPTIMIZERS, Odd, assert_same, odd, on_ranks, reached, train
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group
from zero3.__main__ import main


def fails(capsys: pytest.CaptureFixture[str], source: Path, target: Path, *options: str) -> str:
    """What it says. Nothing is left."""
    assert main(["convert", str(source), str(target), *options]) == 1
    assert not list(target.parent.glob(f"{target.name}*"))
    return capsys.readouterr().err


OTHERS = ["torch", "dcp", "deepspeed"]
EXTRA = {
    "step": 3,
    "schedule": {"last": [1, 2.5, (None, True)], "counts": {1: 2}},
    "ema": torch.linspace(0, 1, 6).view(3, 2),
}


class Stateful(nn.Module):
    """It has extra state, with a tensor in it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = {"seen": 3, "scale": torch.tensor([2.0])}

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state

    def forward(self, x: Tensor) -> Tensor:
        return x


def odd32() -> Odd:
    model = odd().float()
    model.norm = nn.Sequential(model.norm, Stateful())  # type: ignore[assignment]
    return model


Full = tuple[dict[str, Any], dict[str, Any]]


def saved(path: Path, world_size: int, optimizer: str, build: Callable[[], nn.Module], extra: Any) -> Full:
    """What the ranks have at the end, whole."""

    def body(model: Any, made: torch.optim.Optimizer, group: ThreadCommunicator) -> Full:
        train(model, made, range(2))
        zero3.save_checkpoint(path, model, made, extra=extra)
        return zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, made)

    found: Full = on_ranks(world_size, body, optimizer=optimizer, build=build)[0]
    return found


def loaded(
    path: Path, world_size: int, optimizer: str, build: Callable[[], nn.Module], layers: str = "blocks"
) -> tuple[Full, Any, list[float]]:
    """What the ranks have after a load, its extra, and the losses of the steps that follow."""
    models = [build() for _ in range(world_size)]
    for model in models:
        for parameter in model.parameters():
            nn.init.zeros_(parameter.data)

    def body(group: ThreadCommunicator) -> tuple[Full, Any, list[float]]:
        model = zero3.shard(models[group.rank], LAYERS[layers], process_group=process_group(group))
        made = OPTIMIZERS[optimizer](zero3.get_trainable_chunk(model))
        extra = zero3.load_checkpoint(path, model, made)
        full = zero3.full_state_dict(model), zero3.full_optimizer_state_dict(model, made)
        return full, extra, train(model, made, range(2, 4))

    found: tuple[Full, Any, list[float]] = run_ranks(world_size, body)[0]
    return found


def convert(source: Path, target: Path, *options: object) -> Path:
    assert main(["convert", str(source), str(target), *map(str, options)]) == 0
    return target


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("other", OTHERS)
def test_there_and_back(other: str, world_size: int, tmp_path: Path) -> None:
    full = saved(tmp_path / "run", world_size, "AdamW", odd32, EXTRA)
    options = ["--to", other, *(["--ranks", "4"] if other == "deepspeed" else [])]
    back = convert(convert(tmp_path / "run", tmp_path / "theirs", *options), tmp_path / "back")
    direct = loaded(tmp_path / "run", 2, "AdamW", odd32)
    found = loaded(back, 2, "AdamW", odd32, "blocks and maps")
    assert_same(found[0], full)
    assert_same(found[1], EXTRA)
    assert found[2] == pytest.approx(direct[2], abs=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_of_every_optimizer(optimizer: str, tmp_path: Path) -> None:
    """By way of both formats that hold state by name."""
    full = saved(tmp_path / "run", 2, optimizer, odd, None)
    path = convert(tmp_path / "run", tmp_path / "torch", "--to", "torch")
    path = convert(convert(path, tmp_path / "dcp", "--to", "dcp"), tmp_path / "back")
    found, extra, _ = loaded(path, 3, optimizer, odd)
    assert_same(found, full)
    assert extra is None


@pytest.mark.parametrize(
    "extra", [None, {}, 5, [1, {"a": torch.ones(2)}], {"model": 1}, {"extra": 2}, {3: 4}, {"a": {}, "b": []}, {"deepspeed": 1}]
)
@pytest.mark.parametrize("other", OTHERS)
def test_extra_of_any_kind(other: str, extra: Any, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> Any:
        model = zero3.Zero3Layer(nn.Linear(2, 2), process_group=process_group(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zero3.save_checkpoint(tmp_path / "run", model, optimizer, extra=extra)
        convert(convert(tmp_path / "run", tmp_path / "theirs", "--to", other), tmp_path / "back")
        return zero3.load_checkpoint(tmp_path / "back", model, optimizer)

    assert_same(run_ranks(1, body)[0], extra)


def test_the_torch_file_is_the_unsharded_run(tmp_path: Path) -> None:
    """{"model", "optimizer"}, by names, as torch itself reads it, with nothing unpickled."""
    model, optimizer = saved(tmp_path / "run", 3, "AdamW", odd, None)
    whole = torch.load(convert(tmp_path / "run", tmp_path / "file", "--to", "torch"), weights_only=True)
    assert list(whole) == ["model", "optimizer"]
    assert_same(whole["model"], {name: model[name] for name in whole["model"]})
    assert set(whole["model"]) == set(model) and set(model) == set(odd().state_dict())
    assert_same(whole["optimizer"], optimizer)
    plain = odd()
    plain.load_state_dict(whole["model"])
    assert whole["model"]["head.weight"].data_ptr() == whole["model"]["embed.weight"].data_ptr(), "tied, and stored once"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_file_that_plain_torch_saved(world_size: int, tmp_path: Path) -> None:
    """By names of `get_optimizer_state_dict`, or by those that an optimizer over named parameters keeps."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = odd()
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    train(model, optimizer, range(2))
    by_name: Any = get_optimizer_state_dict(model, optimizer)
    expected = {name: {key: value.clone() for key, value in values.items()} for name, values in by_name["state"].items()}
    states = {"names": by_name, "numbers": optimizer.state_dict()}
    for kind, state in states.items():
        torch.save({"model": model.state_dict(), "optimizer": state, "epoch": 2}, tmp_path / kind)
        (found, states_found), extra, losses = loaded(convert(tmp_path / kind, tmp_path / f"{kind} ours"), world_size, "AdamW", odd)
        assert_same(found, {name: model.state_dict()[name].clone() for name in found})
        assert_same(reached(states_found)["state"], expected)
        assert extra == {"epoch": 2} and len(losses) == 2


def test_a_bare_state_dict(tmp_path: Path) -> None:
    torch.save(odd().state_dict(), tmp_path / "file")
    convert(tmp_path / "file", tmp_path / "run")

    def body(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> Any:
        with zero3.full_params(model):
            pass
        zero3.load_checkpoint(tmp_path / "run", model)
        return zero3.full_state_dict(model)

    found = on_ranks(2, body)[0]
    assert_same(found, {name: odd().state_dict()[name] for name in found})
