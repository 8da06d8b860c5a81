"""requires_grad of a released parameter: a change is remembered, and a forward with gradients that would lose something refuses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zero3
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import Turn, assert_at_rest, on_two
from tests.support.stacks import Stack, loss_of, stack, train, words_of

CHANGES: dict[str, tuple[Callable[[Stack], Any], Callable[[Stack], Any], str]] = {
    "requires_grad_": (
        lambda m: m.blocks[1].up.weight.requires_grad_(False),
        lambda m: m.blocks[1].up.weight.requires_grad_(True),
        r"'blocks.1' \(Block\).*'up.weight' \(frozen now\)\. A chunk",
    ),
    "requires_grad set": (
        lambda m: setattr(m.norm.weight, "requires_grad", False),
        lambda m: setattr(m.norm.weight, "requires_grad", True),
        r"the root \(Stack\).*'norm.weight' \(frozen now\)\. A chunk",
    ),
    "of a module": (
        lambda m: m.blocks[2].module.requires_grad_(False),
        lambda m: m.blocks[2].module.requires_grad_(True),
        r"'blocks.2'.*'up.weight' \(frozen now\), 'up.bias' \(frozen now\).*set_adapter.*no_grad",
    ),
}


def frozen_and_trained() -> Stack:
    model = stack()
    model.blocks[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("name", CHANGES)
def test_requires_grad_is_remembered_until_a_forward_with_gradients(name: str) -> None:
    change, change_back, text = CHANGES[name]
    plain = stack()
    with torch.no_grad():
        expected = plain(words_of(Turn(0, 0, 1)))
    loss = train(plain, Turn(0, 1, 1))

    def body(model: Stack, group: ThreadCommunicator) -> Tensor:
        change(model)
        with torch.no_grad():
            assert torch.equal(model(words_of(Turn(0, 0, 1))), expected), "no gradient can be lost here"
        with zero3.resident(model):
            assert torch.equal(model(words_of(Turn(0, 0, 1))), expected)
        with zero3.full_params(model):  # which undoes what is changed inside, not what was before
            pass
        with pytest.raises(RuntimeError, match=f"rank {group.rank}: layer {text}"):
            loss_of(model, Turn(0, 1, 1))
        change_back(model)
        found = train(model, Turn(0, 1, 1))
        assert_at_rest(model)
        assert all(chunk.grad is not None for chunk in zero3.get_trainable_chunk(model))
        return found

    for found in on_two(stack, body):
        assert torch.allclose(found, loss, rtol=1e-12)


def test_requires_grad_of_a_frozen_parameter() -> None:
    def body(model: Stack, group: ThreadCommunicator) -> None:
        weight = model.blocks[0].up.weight
        assert weight.is_leaf
        weight.requires_grad_(True)
        assert weight.requires_grad, "it answers what was asked for"
        with pytest.raises(RuntimeError, match=r"'blocks.0'.*'up.weight' \(trained now\)"):
            loss_of(model, Turn(0, 0, 1))
        weight.requires_grad_(False)
        train(model, Turn(0, 0, 1))

    on_two(frozen_and_trained, body)


def test_where_nothing_is_trained_no_gradient_is_lost() -> None:
    """As inside peft's disable_adapter(): a forward with gradients has none to lose. But a backward finds no graph, as in plain torch."""
    plain = frozen_and_trained().requires_grad_(False)
    expected = loss_of(plain, Turn(0, 0, 1))

    def body(model: Stack, group: ThreadCommunicator) -> None:
        parts = [block.module for block in model.blocks[1:]] + [model.embed.module, model.head.module, model.norm]
        for part in parts:
            part.requires_grad_(False)
        loss = loss_of(model, Turn(0, 0, 1))
        assert torch.equal(loss, expected) and not loss.requires_grad
        for part in parts:
            part.requires_grad_(True)
        train(model, Turn(0, 0, 1))

    on_two(frozen_and_trained, body)


def test_requires_grad_of_a_whole_chunk_overrules_what_was_remembered() -> None:
    def body(model: Stack, group: ThreadCommunicator) -> None:
        model.blocks[1].up.weight.requires_grad_(False)
        for trains in (False, True):  # the chunk's own change is told to all its parameters
            for chunk in model.blocks[1].parameters():
                chunk.requires_grad_(trains)
            train(model, Turn(0, 0, 1))
        assert model.blocks[1].up.weight.requires_grad

    on_two(stack, body)


def test_requires_grad_changed_before_param_groups_are_made() -> None:
    """Gradients of a parameter that is frozen for the moment find their new place as well."""
    plain = stack()
    for step in range(2):
        train(plain, Turn(0, step, 1))

    def body(model: Stack, group: ThreadCommunicator) -> Tensor:
        train(model, Turn(0, 0, 1))
        for chunk in zero3.get_trainable_chunk(model):
            chunk.grad = None
        model.blocks[1].up.weight.requires_grad_(False)
        zero3.param_groups(model, lambda name, info: {"weight_decay": 0.1 if name.endswith("weight") else 0.0, "whole": info.ndim == 2})
        model.blocks[1].up.weight.requires_grad_(True)
        for step in range(2):
            train(model, Turn(0, step, 1))
        owned = [p.grad for p in zero3.get_trainable_chunk(model) if p.shape == (8, 5)]
        return torch.cat([gradient.flatten() for gradient in owned]) if owned else torch.empty(0).double()

    found = torch.cat(on_two(stack, body))
    assert torch.allclose(found, plain.blocks[1].up.weight.grad.flatten(), rtol=1e-10)
