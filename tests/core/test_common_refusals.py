"""What people try on a model and can't be right on a sharded one: refused, and by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support.processes import Rank, on_ranks
from tests.support.training import loss_of, odd_model, sentences
from zero3 import Zero3Layer, Zero3Sequential


def sharded() -> Zero3Sequential:
    return Zero3Sequential([Zero3Layer(module) for module in odd_model()])


def _step_in_hooks() -> None:
    module = nn.Linear(3, 3)

    def step(parameter: nn.Parameter) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    Zero3Layer(module)(torch.ones(2, 3)).sum().backward()


def _touch_after_a_forward(touch: Callable[[nn.Linear], object]) -> None:
    layer = Zero3Layer(nn.Linear(3, 3))
    output = layer(torch.ones(2, 3))
    touch(layer.module)
    output.sum().backward()


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "AveragedModel": (lambda: torch.optim.swa_utils.AveragedModel(Zero3Layer(nn.Linear(3, 3))), "deepcopy.*full_state_dict"),
    "deepcopy": (lambda: copy.deepcopy(sharded()), "deepcopy.*full_state_dict"),
    "deepcopy of a module inside": (lambda: copy.deepcopy(sharded()[1].module), "deepcopy.*full_params"),
    "torch.save": (lambda: torch.save(sharded(), "/dev/null"), "pickle.*full_state_dict"),
    "an embedding that renormalises": (
        lambda: Zero3Layer(nn.Embedding(5, 3, max_norm=0.1))(torch.tensor([1, 2])), "'weight' was changed in place",
    ),
    "an optimizer that steps in hooks": (_step_in_hooks, "'(weight|bias)' was changed in place"),
    "weights written between forward and backward": (
        lambda: _touch_after_a_forward(lambda module: nn.init.zeros_(module.weight)), "zero_: 'weight' of layer.*full_params",
    ),
    "weights read between forward and backward": (
        lambda: _touch_after_a_forward(lambda module: module.weight.norm()), "norm: 'weight' of layer.*full_params",
    ),
    "a new parametrization": (
        lambda: nn.utils.parametrizations.weight_norm(Zero3Layer(nn.Linear(3, 3)).module), "does not have a parameter.*'weight'",
    ),
    "a hook on a parameter that is released": (
        lambda: Zero3Layer(nn.Linear(3, 3)).module.weight.register_hook(lambda g: g), "register_hook: 'weight' of layer",
    ),
}  # fmt: skip


def refusal(rank: Rank, name: str) -> str:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        REFUSED[name][0]()
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_right_is_refused_by_name(name: str) -> None:
    for text in on_ranks(2, refusal, name):
        assert re.search(REFUSED[name][1], text), text


def parameters_at_any_time(rank: Rank) -> list[list[str]]:
    model, names = sharded(), []
    names.append([name for name, _ in model.named_parameters()])
    loss = loss_of(model, sentences(0))
    names.append([name for name, _ in model.named_parameters()])
    loss.backward()
    names.append([name for name, _ in model.named_parameters()])
    return names


def test_parameters_are_the_chunks_between_forward_and_backward_too() -> None:
    # an optimizer built there, or a penalty on all parameters, would count a layer twice
    for names in on_ranks(2, parameters_at_any_time):
        assert names == [[f"{index}.trainable_chunk" for index in range(5)]] * 3
