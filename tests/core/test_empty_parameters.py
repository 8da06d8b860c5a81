"""Parameters without elements: in no chunk, and yet an optimizer over named groups has for them what one of the plain model has."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

import zero3
from tests.checkpoint.test_param_groups import apart, by_decay, plain_groups, whole
from tests.support.checkpoints import assert_same, odd, on_ranks, reached, train
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_close, process_group

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def empties_apart(name: str, info: Any) -> dict[str, Any]:
    """A rate of their own, so that on most ranks nothing is in their group."""
    return {"lr": 0.5 if not info.numel else 0.05}


def frozen_out(name: str, info: Any) -> dict[str, Any] | None:
    return None if name.endswith(".empty") else by_decay(name, info)


def groups_by(model: nn.Module, options: Callable[[str, Any], dict[str, Any] | None]) -> list[dict[str, Any]]:
    """As param_groups makes them, of the plain model."""
    groups: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        info = zero3.ParamInfo(name, tuple(parameter.shape), parameter.numel(), parameter.dtype, parameter.ndim)
        if parameter.requires_grad and (answer := options(name, info)) is not None:
            answer = {key: value for key, value in answer.items() if key != "whole"}
            groups.setdefault(repr(answer), {**answer, "params": []})["params"].append(parameter)
    return list(groups.values())


@pytest.mark.parametrize("options", [by_decay, whole, apart, empties_apart, frozen_out])
@pytest.mark.parametrize("world_size", [1, 3])
def test_full_optimizer_state_dict_is_that_of_the_plain_optimizer(options: Any, world_size: int, tmp_path: Path) -> None:
    """Every name in its group, and with its state, the empty ones included."""
    reference = odd()
    optimizer = torch.optim.AdamW(groups_by(reference, options), lr=0.05)
    train(reference, optimizer, range(2))
    expected = deepcopy(dict(get_optimizer_state_dict(reference, optimizer, options=FULL)))
    expected["state"] = {name: state for name, state in expected["state"].items() if state}

    def body(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> Any:
        optimizer = torch.optim.AdamW(zero3.param_groups(model, options), lr=0.05)
        zero3.check_optimizer(model, optimizer)
        train(model, optimizer, range(2))
        zero3.clip_grad_norm_(model, 1.0)
        zero3.save_checkpoint(tmp_path, model, optimizer)
        found = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)
        optimizer.state.clear()
        for given in optimizer.param_groups:
            given["lr"] = 7.0
        zero3.load_checkpoint(tmp_path, model, optimizer)
        assert_same(zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False), found)
        optimizer.state.clear()
        zero3.load_full_optimizer_state_dict(model, optimizer, found)
        assert_same(zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False), found)
        return found

    for found in on_ranks(world_size, body):
        assert reached(found)["state"].keys() == expected["state"].keys()
        for name, state in expected["state"].items():
            assert {key: (v.shape, v.dtype) for key, v in found["state"][name].items()} == {k: (v.shape, v.dtype) for k, v in state.items()}
            assert_close(found["state"][name], state, 1e-12, name)
        assert [sorted(each["params"]) for each in found["param_groups"]] == [sorted(each["params"]) for each in expected["param_groups"]]
        assert [each["lr"] for each in found["param_groups"]] == [each["lr"] for each in expected["param_groups"]]


def test_each_is_on_one_rank_only() -> None:
    def body(model: Any, _: torch.optim.Optimizer, group: ThreadCommunicator) -> list[tuple[int, ...]]:
        groups = zero3.param_groups(model, by_decay)
        return [tuple(p.shape) for given in groups for p in given["params"] if p.numel() == 0 and p.ndim == 2]

    assert [shape for found in on_ranks(3, body) for shape in found] == [(0, 3)] * 3


class Beside(nn.Module):
    """A linear map, and something empty beside it; or only that."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.linear = None if alone else nn.Linear(3, 2)
        self.weight, self.bias = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        empty = self.weight.sum() + self.bias.sum()
        return x.sum() + empty if self.linear is None else self.linear(x).sum() + empty


def test_nothing_but_empty_ones() -> None:
    def body(group: ThreadCommunicator) -> Any:
        model = zero3.Zero3Layer(models[group.rank], process_group=process_group(group))
        optimizer = torch.optim.SGD(zero3.param_groups(model, lambda name, info: {"name": name}), lr=0.1, momentum=0.9)
        model(torch.ones(2, 3)).backward()
        optimizer.step()
        return zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)

    models = [Beside(alone=True) for _ in range(2)]
    for found in run_ranks(2, body):
        assert [group["params"] for group in found["param_groups"]] == [["weight"], ["bias"]]
        assert {name: state["momentum_buffer"].shape for name, state in found["state"].items()} == {"weight": (0, 3), "bias": (0,)}


def test_gradients_kept_under_no_sync_survive_the_zeroing_of_an_empty_one() -> None:
    """It was all zeros before: that does not say that the others were zeroed."""
    plain, x = Beside(alone=False), torch.ones(2, 3)
    models = [deepcopy(plain) for _ in range(2)]

    def body(group: ThreadCommunicator) -> list[float]:
        model = zero3.Zero3Layer(models[group.rank], process_group=process_group(group))
        parameters = [p for given in zero3.param_groups(model, lambda name, info: {"name": name}) for p in given["params"]]
        model(x).backward()
        with zero3.no_sync(model):
            model(x).backward()
        for parameter in parameters:
            if parameter.grad is not None and not parameter.numel():
                parameter.grad.zero_()
        model(x).backward()
        return [p.grad.sum().item() for p in parameters if p.grad is not None and p.numel()]

    found = sum(value for each in run_ranks(2, body) for value in each)
    plain(x).backward()
    assert found == pytest.approx(3 * sum(p.grad.sum().item() for p in plain.parameters() if p.grad is not None))


def test_the_groups_of_the_plain_model_are_the_same_as_elsewhere() -> None:
    ours, theirs = groups_by(odd(), by_decay), plain_groups(odd())
    assert [[p.shape for p in group["params"]] for group in ours] == [[p.shape for p in group["params"]] for group in theirs]
