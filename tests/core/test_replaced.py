"""Parameters that are replaced after sharding, as torch's functional_call does for one call: nothing has changed once they are put back."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, stateless

import zero3
from tests.support.models import WORLDS
from tests.support.reference import Turn, by_shard, check_parity
from tests.support.stacks import Stack, loss_of, stack, train_and_look, words_of

REPLACED = r"layer .*was replaced after wrapping, found a (Tensor|NoneType), expected the object that was wrapped.*writeback.*resident"
STRANGER = r"belongs to a sharded model, and was to get parameters that are not"


def _values(*names: str) -> dict[str, Tensor]:
    return {name: 2 * value.detach() for name, value in stack().named_parameters() if name in names or not names}


def _call(values: Callable[[], dict[str, Any]], model: Stack, turn: Turn) -> None:
    torch.func.functional_call(model, values(), (words_of(turn),))


def _reparametrized(model: Stack, turn: Turn) -> None:
    with stateless._reparametrize_module(model, _values("blocks.0.up.weight", "blocks.1.up.weight")):
        loss_of(model, turn)


def _assigned(value: Callable[[Tensor], Any], model: Stack, turn: Turn) -> None:
    up = model.blocks[1].up
    old = up.weight
    del up.weight
    up.weight = value(old)
    try:
        loss_of(model, turn)
    finally:
        up.weight = old


def _assigned_for_no_call(model: Stack, turn: Turn) -> None:
    old, model.norm.weight = model.norm.weight, nn.Parameter(torch.ones(2))
    model.norm.weight = old


def _registered(model: Stack, turn: Turn) -> None:
    parametrize.register_parametrization(model.blocks[1].up, "weight", nn.Identity())


def _swapped(model: Stack, turn: Turn) -> None:
    torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.ones(model.head.weight.shape)))


Way = Callable[[Stack, Turn], None]
REFUSED: dict[str, Way] = {
    "functional_call of one": partial(_call, partial(_values, "head.weight")),
    "functional_call of one of the root": partial(_call, partial(_values, "norm.weight")),
    "functional_call of two layers": partial(_call, partial(_values, "embed.weight", "head.weight")),
    "functional_call of all": partial(_call, _values),
    "functional_call of parameters": partial(_call, lambda: dict(stack().named_parameters())),
    "_reparametrize_module": _reparametrized,
    "a parameter": partial(_assigned, lambda old: nn.Parameter(torch.ones(old.shape))),
    "a tensor": partial(_assigned, lambda old: torch.ones(old.shape)),
    "nothing": partial(_assigned, lambda _: None),
}
OTHERWISE: dict[str, tuple[Way, str]] = {
    "an assignment without a call": (_assigned_for_no_call, STRANGER),
    "register_parametrization": (_registered, "does not have a parameter"),
    "swap_tensors": (_swapped, "Cannot swap"),
}
WAYS = {name: (way, STRANGER if "parameter" in name else REPLACED) for name, way in REFUSED.items()} | OTHERWISE


def _tried(way: Way, text: str, model: Stack, turn: Turn) -> None:
    try:
        way(model, turn)
        found = ""
    except (RuntimeError, ValueError) as error:
        found = str(error)
    assert re.search(text, found, re.S) if text else not found, found


@pytest.mark.parametrize("then", ["forward", "reset", "full_state_dict"])
@pytest.mark.parametrize("name", WAYS)
@WORLDS
def test_training_goes_on_after_parameters_were_replaced_and_put_back(world_size: int, name: str, then: str) -> None:
    def program(model: Any, turn: Turn) -> Tensor:
        if zero3.is_sharded(model):
            _tried(*WAYS[name], model, turn)
            if then == "reset":
                zero3.reset(model)
                assert all("chunk" in listed for listed, _ in model.named_parameters())
                model.zero_grad()
            if then == "full_state_dict":
                zero3.full_state_dict(model)
        return train_and_look(model, turn)

    check_parity(stack, program, world_size=world_size, shard=by_shard)


def test_what_stays_replaced_is_refused_again_and_again() -> None:
    model, value = zero3.shard(stack()), torch.ones(8, 5)
    up = model.blocks[1].up
    old = up.weight
    del up.weight
    up.weight = value
    for use in (lambda: loss_of(model, Turn(0, 0, 1)), lambda: zero3.full_state_dict(model), lambda: loss_of(model, Turn(0, 0, 1))):
        with pytest.raises(RuntimeError, match=REPLACED):
            use()
        assert up.weight is value
        zero3.reset(model)
    up.weight = old
    loss_of(model, Turn(0, 0, 1)).backward()


def test_a_parameter_that_is_refused_in_the_place_of_another_changes_nothing() -> None:
    model = zero3.shard(stack())
    names = [name for name, _ in model.named_parameters()]
    for module in (model.head, model.norm, model.blocks[0].up):
        with pytest.raises(RuntimeError, match=STRANGER):
            module.weight = nn.Parameter(torch.ones(module.weight.shape))
    assert [name for name, _ in model.named_parameters()] == names
    loss_of(model, Turn(0, 0, 1)).backward()


def test_a_parameter_that_a_module_has_none_of_is_new() -> None:
    model = zero3.shard(stack())
    with pytest.raises(RuntimeError, match=r"was to get parameters that are not: bias"):
        model.head.bias = nn.Parameter(torch.ones(23))
    loss_of(model, Turn(0, 0, 1)).backward()
