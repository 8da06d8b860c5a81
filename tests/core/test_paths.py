"""Every way through forward and backward gives what plain torch gives: gradients, parameters, outputs, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WIDTH, WORLDS, calls, linear, mlp, seeded
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import (
    Program,
    Shard,
    Turn,
    as_one_layer,
    assert_at_rest,
    check_parity,
    in_place,
    in_sequence,
    nested,
    on_ranks,
)

SHARDS = pytest.mark.parametrize("shard", [in_sequence, in_place, nested, as_one_layer])
KINDS = pytest.mark.parametrize("use_reentrant", [False, True])


def mean_square(model: Callable[[Tensor], Tensor], turn: Turn, *shape: int) -> Tensor:
    loss = model(turn.tensor(*(shape or (4, WIDTH)))).pow(2).mean()
    loss.backward()
    return loss


def loss_of(model: nn.Module, turn: Turn, scale: float = 1.0) -> Tensor:
    return model(turn.tensor(3, WIDTH) * scale).pow(2).mean()


@WORLDS
@SHARDS
def test_training_is_the_same_however_layers_are_arranged(world_size: int, shard: Shard) -> None:
    check_parity(mlp, mean_square, world_size=world_size, shard=shard, steps=3)


# -- how often and in which order forward and backward come


def summed(model: nn.Module, turn: Turn) -> Any:
    first, second = loss_of(model, turn), loss_of(model, turn, 2.0)
    (first + 3 * second).backward()
    return first, second


def first_backward_first(model: nn.Module, turn: Turn) -> Any:
    first, second = loss_of(model, turn), loss_of(model, turn, 2.0)
    first.backward()
    second.backward()
    return first, second


def last_backward_first(model: nn.Module, turn: Turn) -> Any:
    first, second = loss_of(model, turn), loss_of(model, turn, 2.0)
    second.backward()
    first.backward()
    return first, second


def fed_back(model: nn.Module, turn: Turn) -> Any:
    """The output of one forward is the input of the next."""
    x = turn.tensor(3, WIDTH, requires_grad=True)
    loss = model(model(model(x))).pow(2).mean()
    loss.backward()
    return loss, x.grad


def forward_without_backward(model: nn.Module, turn: Turn) -> Any:
    before = model(turn.tensor(3, WIDTH))
    loss = mean_square(model, turn)
    after = model(turn.tensor(3, WIDTH) * 2)
    return before, loss, after


def evaluation_between_forward_and_backward(model: nn.Module, turn: Turn) -> Any:
    loss = loss_of(model, turn)
    model.eval()
    with torch.no_grad():
        quiet = loss_of(model, turn, 5.0)
    with torch.inference_mode():
        silent = loss_of(model, turn, 6.0)
    model.train()
    loss.backward()
    return loss, quiet, silent.clone()


def retain_graph_twice(model: nn.Module, turn: Turn) -> Any:
    loss = loss_of(model, turn)
    loss.backward(retain_graph=True)
    other = mean_square(model, turn)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss, other


def gradient_of_the_input(model: nn.Module, turn: Turn) -> Any:
    x = turn.tensor(3, WIDTH, requires_grad=True)
    loss = model(x).pow(2).mean()
    (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    return gradient, x.grad


def gradient_of_the_input_alone(model: nn.Module, turn: Turn) -> Any:
    """A graph that autograd.grad went through and nothing else, then training on another."""
    x = turn.tensor(3, WIDTH, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).pow(2).mean(), x)
    return gradient, mean_square(model, turn)


def accumulated(model: nn.Module, turn: Turn) -> Any:
    return [mean_square(model, turn, 2 + i, WIDTH) for i in range(4)]


def backward_into_the_middle(model: nn.Module, turn: Turn) -> Any:
    """Gradients begin at an output that is not the last computed."""
    x = turn.tensor(3, WIDTH)
    first, second = model(x), model(x * 2)
    del second
    first.backward(torch.ones_like(first) / 7)
    return first


@WORLDS
@pytest.mark.parametrize("shard", [in_sequence, in_place])
@pytest.mark.parametrize(
    "program",
    [
        summed,
        first_backward_first,
        last_backward_first,
        fed_back,
        forward_without_backward,
        evaluation_between_forward_and_backward,
        retain_graph_twice,
        gradient_of_the_input,
        gradient_of_the_input_alone,
        accumulated,
        backward_into_the_middle,
    ],
)
def test_forwards_and_backwards_may_come_in_any_order(world_size: int, shard: Shard, program: Program) -> None:
    check_parity(mlp, program, world_size=world_size, shard=shard)


@WORLDS
def test_gradients_of_other_tensors_reduce_nothing(world_size: int) -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        x = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True)
        model(x).sum().backward()
        model.zero_grad()
        group.log.clear()
        for parameters_too in (True, False):
            model.requires_grad_(parameters_too)
            torch.autograd.grad(model(x).sum(), x)
            assert [chunk.grad for chunk in model.parameters()] == [None] * 3
        assert not [made for made in group.log if made.kind == "reduce_scatter"]
        assert_at_rest(model)

    on_ranks(world_size, mlp, body)


@WORLDS
def test_a_layer_may_be_called_several_times(world_size: int) -> None:
    def reuse(model: nn.Sequential, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
        a, b = (zero3.Zero3Layer(child, policy=policy, process_group=group) for child in model.children())
        return zero3.Zero3Sequential([a, b, a, a])

    class Twice(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            a, b = self.children()
            return a(a(b(a(x))))

    check_parity(lambda: Twice(*mlp(2)), mean_square, world_size=world_size, shard=reuse)
    check_parity(lambda: Twice(*mlp(2)), mean_square, world_size=world_size, shard=in_place)


# -- what stands first or last in a layer


IN_AND_OUT: dict[str, Callable[[Any, Tensor], Any]] = {
    "in-place operation first": lambda m, x: m.a(x.mul_(2).tanh()),
    "in-place operation on a view first": lambda m, x: m.a(x[:, :2].mul_(2).sum(1, keepdim=True) + x),
    "input changed in place is the output": lambda m, x: x.add_(m.a(x.clone())),
    "input changed through a view is the output": lambda m, x: (x[:, 1:].add_(m.a(x.clone())[:, 1:]), x)[1],
    "output is a view": lambda m, x: m.a(x).tanh().t().t()[:, :],
    "output is a part of something bigger": lambda m, x: torch.cat([m.a(x), m.b(x)], 1)[:, :WIDTH],
    "in-place operation last": lambda m, x: m.a(x).mul_(2),
    "one parameter unused": lambda m, x: m.a.weight.sum() + x,
    "a weight used outside its module": lambda m, x: (x @ m.b.weight + m.a(x)).tanh(),
    "a weight is a factor": lambda m, x: x * m.a.bias * m.a.weight.mean(),
    "detached branch": lambda m, x: m.a(x) + m.b(x.detach()).detach(),
    "gradient switched off inside": lambda m, x: m.a(x) + without_gradient(m.b, x),
    "gradient flows to parameters only": lambda m, x: m.a(x.detach()).tanh(),
}


def without_gradient(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x)


@WORLDS
@pytest.mark.parametrize("name", IN_AND_OUT)
def test_a_layer_may_begin_and_end_with_anything(world_size: int, name: str) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        x = turn.tensor(3, WIDTH, requires_grad=True)
        loss = model(x * 1).pow(2).mean()
        loss.backward()
        return loss, x.grad

    check_parity(lambda: seeded(*[calls(IN_AND_OUT[name])] * 3), program, world_size=world_size)


@WORLDS
@pytest.mark.parametrize("name", ["whole", "view", "base"])
def test_the_caller_may_change_an_output_in_place(world_size: int, name: str) -> None:
    change: dict[str, Callable[[Tensor], Any]] = {
        "whole": lambda y: y.mul_(2),
        "view": lambda y: y[:, 1:].mul_(3),
        "base": lambda y: y._base.mul_(2) if y._base is not None else y.mul_(2),
    }

    def program(model: nn.Module, turn: Turn) -> Any:
        y = model(turn.tensor(3, WIDTH))
        change[name](y)
        y.pow(2).mean().backward()
        return y

    for last in (lambda m, x: m.a(x).tanh() * 1, lambda m, x: torch.cat([m.a(x), m.b(x)], 1)[:, 1 : 1 + WIDTH]):
        check_parity(lambda last=last: seeded(linear, calls(last)), program, world_size=world_size)


class Stopping(nn.Module):
    """A layer that lets no gradient through, if its input says so."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, pair: tuple[Tensor, bool]) -> tuple[Tensor, bool]:
        x, stops = pair
        return torch.tanh(self.out(self.linear(x.detach() if stops else x))), stops


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("prefetch_depth", [0, 1])
def test_two_forwards_in_one_backward_that_stops_earlier_on_one_rank(prefetch_depth: int, world_size: int) -> None:
    """The later forward's layers are all finished before the earlier one's begin, also those that nothing flows to on this rank."""

    def program(model: nn.Module, turn: Turn) -> Any:
        first, _ = model((turn.tensor(3, WIDTH), False))
        second, _ = model((2 * turn.tensor(3, WIDTH), turn.rank == 1))
        loss = first.pow(2).mean() + 3 * second.pow(2).mean()
        loss.backward()
        return loss

    def build() -> nn.Sequential:
        return seeded(*(partial(Stopping, width) for width in (3, 5, 7, 9)))

    check_parity(build, program, world_size=world_size, policy=zero3.ShardingPolicy(prefetch_depth=prefetch_depth))
