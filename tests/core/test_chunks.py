"""What a user sees of a sharded model's parameters: chunks outside of compute, the unwrapped names and objects inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.core.test_parameters import tied_inside
from tests.support.models import WIDTH, WORLDS, calls, linear, mean_square, mlp, rows, seeded
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import (
    Turn,
    as_one_layer,
    full_parameters,
    in_place,
    in_sequence,
    nested,
    on_ranks,
    process_group,
    sgd,
    unsharded,
)

X = rows(3)


def sharded(model: nn.Module, group: ThreadCommunicator) -> zero3.Zero3Sequential:
    model = in_sequence(model, process_group(group), zero3.ShardingPolicy())
    assert isinstance(model, zero3.Zero3Sequential)
    return model


@WORLDS
@pytest.mark.parametrize("shard", [in_sequence, in_place, nested, as_one_layer])
def test_full_params_have_names_shapes_and_values_of_the_unwrapped_model(world_size: int, shard: Any) -> None:
    def build() -> nn.Module:
        return seeded(linear, tied_inside, calls(lambda m, x: m.a(x)))

    plain = build()

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        model = shard(model, process_group(group), zero3.ShardingPolicy())
        found = full_parameters(model)
        assert list(found) == [name for name, _ in plain.named_parameters()]
        assert all(torch.equal(found[name], value) for name, value in plain.named_parameters())
        with zero3.full_params(model):
            assert list(model.state_dict()) == list(plain.state_dict())
            assert [type(p) for p in model.parameters()] == [nn.Parameter] * len(found)

    on_ranks(world_size, build, body, unsharded)


@WORLDS
def test_a_parameter_is_one_object_for_life(world_size: int) -> None:
    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        kept, seen = list(model.parameters()), []
        for child in model:
            child.register_forward_pre_hook(lambda module, _: seen.extend(module.parameters()))
            child.register_full_backward_hook(lambda module, *_: seen.extend(module.parameters()))
        wrapped = sharded(model, group)
        for _ in range(2):
            wrapped(X.clone().requires_grad_()).sum().backward()
        with zero3.full_params(wrapped):
            seen.extend(wrapped.parameters())
        assert len(seen) == 5 * len(kept)
        assert {id(parameter) for parameter in seen} == {id(parameter) for parameter in kept}
        assert all(isinstance(parameter, nn.Parameter) for parameter in kept)

    on_ranks(world_size, mlp, body, unsharded)


@WORLDS
def test_parameters_and_get_trainable_chunk_are_the_chunks_and_nothing_else(world_size: int) -> None:
    """So an optimizer that is built on them is right."""

    def body(model: nn.Module, group: ThreadCommunicator) -> list[int]:
        model[0].requires_grad_(False)
        wrapped = sharded(model, group)
        chunks = list(wrapped.parameters())
        assert [chunk.requires_grad for chunk in chunks] == [False, True, True]
        assert [id(chunk) for chunk in wrapped.get_trainable_chunk()] == [id(chunk) for chunk in chunks[1:]]
        wrapped(X).sum().backward()
        assert [id(chunk) for chunk in wrapped.parameters()] == [id(chunk) for chunk in chunks]
        assert all(type(chunk) is nn.Parameter and chunk.dim() == 1 for chunk in chunks)
        return [chunk.numel() for chunk in chunks]

    numel = WIDTH * WIDTH + WIDTH
    assert on_ranks(world_size, mlp, body, unsharded) == [[-(-numel // world_size)] * 3] * world_size


@WORLDS
def test_requires_grad_freezes_and_thaws_a_chunk_as_a_whole(world_size: int) -> None:
    def freeze(model: nn.Module, step: int) -> None:
        for parameter in list(model.children())[1].parameters():
            parameter.requires_grad_(step % 2 == 0)

    def program(model: nn.Module, turn: Turn) -> Any:
        freeze(model, turn.step)
        return mean_square(model, turn)

    plain, history = mlp(), []
    optimizer = sgd(plain.parameters())
    for step in range(4):
        optimizer.zero_grad()
        for rank in range(world_size):
            program(plain, Turn(rank, step, world_size))
        for parameter in plain.parameters():
            parameter.grad = parameter.grad / world_size if parameter.grad is not None else None
        optimizer.step()
        history.append({name: parameter.detach().clone() for name, parameter in plain.named_parameters()})

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        wrapped = sharded(model, group)
        optimizer = sgd(wrapped.parameters())
        for step in range(4):
            optimizer.zero_grad()
            program(wrapped, Turn(group.rank, step, world_size))
            assert len(wrapped.get_trainable_chunk()) == (3 if step % 2 == 0 else 2)
            optimizer.step()
            found = full_parameters(wrapped)
            assert all(torch.allclose(found[name], value, rtol=0, atol=1e-12) for name, value in history[step].items())

    on_ranks(world_size, mlp, body, unsharded)


@WORLDS
def test_register_hook_on_a_chunk_sees_the_reduced_gradient(world_size: int) -> None:
    """As hooks on the parameters of one process that has the whole batch: they may change it, and step on it."""

    def train(model: nn.Module, turns: list[Turn]) -> None:
        """The gradient is clamped, and each parameter is stepped, and its gradient dropped, within the backward."""

        def step(parameter: nn.Parameter) -> None:
            optimizer = sgd([parameter])
            optimizer.step()
            optimizer.zero_grad()

        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            parameter.register_post_accumulate_grad_hook(step)
        for turn in turns:
            x = torch.cat([turn._replace(rank=rank).tensor(3, WIDTH) for rank in range(world_size)])
            mine = x.view(world_size, 3, WIDTH)[turn.rank] if turn.rank >= 0 else x
            model(mine).pow(2).mean().backward()

    plain = mlp()
    train(plain, [Turn(-1, step, world_size) for step in range(3)])

    def body(model: Any, group: ThreadCommunicator) -> None:
        train(model, [Turn(group.rank, step, world_size) for step in range(3)])
        assert [chunk.grad for chunk in model.parameters()] == [None] * 3
        for name, value in full_parameters(model).items():
            assert torch.allclose(value, plain.get_parameter(name), rtol=0, atol=1e-12), name

    on_ranks(world_size, mlp, body)


@WORLDS
def test_requires_grad_thaws_what_was_wrapped_frozen(world_size: int) -> None:
    def build() -> nn.Module:
        model = mlp()
        model[0].requires_grad_(False)
        return model

    plain = mlp()
    plain(X).pow(2).mean().backward()
    expected = {name: p.detach() - 0.1 * p.grad for name, p in plain.named_parameters() if p.grad is not None}

    def body(model: nn.Module, group: ThreadCommunicator) -> None:
        wrapped = sharded(model, group)
        assert len(wrapped.get_trainable_chunk()) == 2
        wrapped(X).sum().backward()
        wrapped.zero_grad()
        wrapped[0].requires_grad_(True)
        optimizer = sgd(wrapped.get_trainable_chunk())
        wrapped(X).pow(2).mean().backward()
        optimizer.step()
        found = full_parameters(wrapped)
        assert all(torch.allclose(found[name], value, rtol=0, atol=1e-12) for name, value in expected.items())

    on_ranks(world_size, build, body, unsharded)
