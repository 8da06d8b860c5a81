"""Checkpoints and full state of optimizers over param_groups: options by name, parts of chunks, whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import zero3
from tests.checkpoints import assert_same, odd, train
from tests.ranks import ThreadCommunicator, run_ranks
from tests.reference import assert_close, process_group

Options = Callable[[str, Any], dict[str, Any] | None]
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def decay(name: str, info: Any) -> dict[str, Any]:
    return {"weight_decay": 0.1 if info.ndim > 1 else 0.0}


def matrices_whole(name: str, info: Any) -> dict[str, Any]:
    return {"weight_decay": 0.1, "whole": True} if info.ndim > 1 else {"weight_decay": 0.0}


def all_whole(name: str, info: Any) -> dict[str, Any] | None:
    return {"whole": True} if info.numel else None  # torch's Adafactor divides by the number of elements


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def adafactor(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(groups, lr=0.01)


KINDS: dict[str, tuple[Options, Make]] = {
    "AdamW, parts": (decay, adamw),
    "AdamW, some whole": (matrices_whole, adamw),
    "Adafactor, whole": (all_whole, adafactor),
}


def plain(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    options, make = KINDS[kind]
    model = odd()
    groups: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        info = zero3.ParamInfo(name, tuple(parameter.shape), parameter.numel(), parameter.dtype, parameter.ndim)
        if parameter.requires_grad and (answer := options(name, info)) is not None:
            chosen = {key: value for key, value in answer.items() if key != "whole"}
            match = next((group for group in groups if {k: v for k, v in group.items() if k != "params"} == chosen), None)
            if match is None:
                groups.append(match := {**chosen, "params": []})
            match["params"].append(parameter)
    optimizer = make(groups)
    train(model, optimizer, range(steps))
    return model, optimizer


def on_ranks(world_size: int, kind: str, body: Callable[[Any, torch.optim.Optimizer], Any]) -> list[Any]:
    options, make = KINDS[kind]
    models = [odd() for _ in range(world_size)]

    def rank(group: ThreadCommunicator) -> Any:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        return body(model, make(zero3.param_groups(model, options)))

    return run_ranks(world_size, rank)


def snapshot(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": zero3.full_state_dict(model, rank0_only=False),
        "optimizer": zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"],
    }


@pytest.mark.parametrize(("world_size", "to"), [(1, 2), (2, 2), (2, 3), (3, 1), (4, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_round_trips(kind: str, world_size: int, to: int, tmp_path: Path) -> None:
    def save(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        train(model, optimizer, range(3))
        zero3.save_checkpoint(tmp_path, model, optimizer)
        return snapshot(model, optimizer)

    def load(model: Any, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
        train(model, optimizer, [7])
        zero3.load_checkpoint(tmp_path, model, optimizer)
        loaded = snapshot(model, optimizer)
        train(model, optimizer, range(3, 5))
        return loaded, zero3.full_state_dict(model, rank0_only=False)

    saved = on_ranks(world_size, kind, save)[0]
    expected = plain(kind, 5)[0].state_dict()
    for loaded, after in on_ranks(to, kind, load):
        assert_same(loaded, saved)
        assert_close(after, expected, 1e-11, "five steps of plain torch")


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_full_state_is_torchs(kind: str, world_size: int) -> None:
    model, optimizer = plain(kind, 3)
    expected = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))

    def body(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        train(model, optimizer, range(3))
        return zero3.full_optimizer_state_dict(model, optimizer)

    found = on_ranks(world_size, kind, body)[0]
    assert found["state"].keys() == expected["state"].keys()
    for name, state in expected["state"].items():
        assert_close(found["state"][name], state, 1e-11, name)
    names = [group["params"] for group in found["param_groups"]]
    assert names == [group["params"] for group in expected["param_groups"]]


def test_from_parts_to_chunks_and_to_whole_parameters(tmp_path: Path) -> None:
    """How an optimizer's parameters were cut is no part of a checkpoint."""

    def save(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        train(model, optimizer, range(3))
        zero3.save_checkpoint(tmp_path, model, optimizer)
        return snapshot(model, optimizer)

    def load(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        zero3.load_checkpoint(tmp_path, model, optimizer)
        return snapshot(model, optimizer)

    saved = on_ranks(2, "AdamW, parts", save)[0]
    for loaded in on_ranks(3, "AdamW, some whole", load):
        assert_same(loaded, saved)
