"""full_state_dict, load_full_state_dict, and torch's own load_state_dict inside full_params."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WORLDS, linear, seeded
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import assert_at_rest, assert_close, full_parameters, on_ranks
from tests.test_access import X


class Counter(nn.Module):
    """Persistent and other buffers, beside a tied and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.first, self.second = linear(), linear()
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def counted() -> nn.Sequential:
    return seeded(linear, Counter, nn.Tanh, linear)


@WORLDS
def test_full_state_dict_goes_out_and_load_full_state_dict_takes_it_back(world_size: int) -> None:
    plain = counted()

    def body(model: Any, group: ThreadCommunicator) -> None:
        states = zero3.full_state_dict(model)
        if group.rank == 0:
            assert list(states) == list(plain.state_dict())
            assert_close(states, plain.state_dict(), 0, "state dict")
        else:
            assert states == {}
        assert_close(zero3.full_state_dict(model, rank0_only=False), plain.state_dict(), 0, "state dict")
        zero3.load_full_state_dict(model, {name: value + 1 for name, value in states.items()} if group.rank == 0 else None)
        assert_close(
            zero3.full_state_dict(model, rank0_only=False), {name: value + 1 for name, value in plain.state_dict().items()}, 0, "loaded"
        )
        model(X).sum().backward()
        assert_at_rest(model)

    on_ranks(world_size, counted, body)


@WORLDS
def test_load_full_state_dict_that_does_not_fit_changes_nothing_and_says_all_that_is_wrong(world_size: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        before = zero3.full_state_dict(model, rank0_only=False)
        wrong = {name: value * 0 for name, value in before.items() if name != "0.bias"} | {"nobody": torch.ones(1)}
        wrong["3.weight"] = torch.ones(2, 3)
        says = r"missing: 0\.bias\. unknown: nobody\. other shapes: 3\.weight has \(2, 3\), expected \(5, 5\)"
        with pytest.raises(ValueError, match=says):
            zero3.load_full_state_dict(model, wrong if group.rank == 0 else {})
        assert_close(zero3.full_state_dict(model, rank0_only=False), before, 0, "state dict")
        del wrong["3.weight"]
        zero3.load_full_state_dict(model, wrong, strict=False)
        after = zero3.full_state_dict(model, rank0_only=False)
        for name, value in before.items():
            assert torch.equal(after[name], value if name in ("0.bias", "3.weight") else value * 0), name

    on_ranks(world_size, counted, body)


@WORLDS
def test_torchs_own_load_state_dict_works_inside_full_params(world_size: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        wanted = {name: value * 0 + 2 for name, value in counted().state_dict().items()} if group.rank == 0 else {}
        with zero3.full_params(model, writeback=True):
            model.load_state_dict(wanted, strict=group.rank == 0)
        assert all(value.eq(2).all() for value in full_parameters(model).values())
        with pytest.raises(RuntimeError, match="load_full_state_dict"):
            model.load_state_dict(wanted)
        with pytest.raises(RuntimeError, match="full_state_dict"):
            model.state_dict()

    on_ranks(world_size, counted, body)


def test_torchs_own_load_state_dict_of_a_lone_layer() -> None:
    layer = zero3.Zero3Layer(nn.Linear(2, 3))
    wanted = {name: value * 0 + 2 for name, value in nn.Linear(2, 3).state_dict().items()}
    with pytest.raises(RuntimeError, match="load_full_state_dict"):
        layer.load_state_dict(wanted)
    with zero3.full_params(layer, writeback=True):
        assert not any(layer.load_state_dict(wanted))
    assert all(value.eq(2).all() for value in full_parameters(layer).values())
