"""`backward(inputs=chunks)`: the gradients of these chunks are computed and reduced, and all others are left as they are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WIDTH, WORLDS, mlp
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import (
    TOLERANCE,
    Turn,
    as_one_layer,
    assert_at_rest,
    assert_close,
    in_place,
    in_sequence,
    nested,
    process_group,
)
from zero3 import ShardingPolicy

HOW: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "a list": list,
    "a dict": lambda chunks: {str(number): chunk for number, chunk in enumerate(chunks)},
    "an iterator": iter,
}


def loss_of(model: Any, rank: int, number: int) -> Tensor:
    return model(Turn(rank, number, 0).tensor(3, WIDTH)).pow(2).mean()


def by_plain(world_size: int, picked: list[str], numbers: tuple[int, ...]) -> dict[str, Tensor]:
    """Each micro-batch's gradients of the parameters whose names begin with one of `picked`; that of number 9 of all."""
    plain = mlp()
    for rank in range(world_size):
        for number in numbers:
            wanted = [p for name, p in plain.named_parameters() if number == 9 or name.startswith(tuple(picked))]
            torch.autograd.backward(loss_of(plain, rank, number) / world_size, inputs=wanted)
    return {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}


def found_in(model: Any) -> dict[str, Tensor]:
    zero3.clip_grad_norm_(model, float("inf"))  # reduces what is deferred
    with zero3.full_gradients(model) as gradients:
        return {name: gradient.clone() for name, gradient in gradients.items()}


def by_shard(model: nn.Module, group: Any, policy: ShardingPolicy) -> nn.Module:
    return zero3.shard(model, list(model.children()), process_group=group, policy=policy)


POLICIES = [{}, {"stage": 2}, {"stage": 1}, {"transactional": True}, {"reshard_after_forward": False}, {"prefetch_depth": 0}]
WAYS = [("a list", policy) for policy in POLICIES] + [(how, {}) for how in HOW if how != "a list"]


@WORLDS
@pytest.mark.parametrize(("how", "policy"), WAYS, ids=str)
@pytest.mark.parametrize("shard", [in_sequence, in_place, by_shard])
def test_backward_inputs_are_chunks_of_some_layers(shard: Any, how: str, policy: dict[str, Any], world_size: int) -> None:
    models = [mlp() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> tuple[list[bool], dict[str, Tensor], dict[str, Tensor]]:
        model = shard(models[group.rank], process_group(group), ShardingPolicy(**policy))
        layers = [layer for layer in model.modules() if isinstance(layer, zero3.Zero3Layer)]
        picked = [*layers[0].get_trainable_chunk(), *layers[2].get_trainable_chunk()]
        for number in range(2):
            torch.autograd.backward(loss_of(model, group.rank, number), inputs=HOW[how](picked))
        untouched = [chunk.grad is None for layer in layers for chunk in layer.get_trainable_chunk()]
        some = found_in(model)
        loss_of(model, group.rank, 9).backward()
        loss_of(model, group.rank, 2).backward(inputs=HOW[how](picked))
        if policy.get("stage", 3) == 3:
            assert_at_rest(model)
        return untouched, some, found_in(model)

    first, second = by_plain(world_size, ["0.", "2."], (0, 1)), by_plain(world_size, ["0.", "2."], (0, 1, 9, 2))
    for untouched, some, everything in run_ranks(world_size, body):
        assert untouched == [False, True, False]
        assert_close(some, first, TOLERANCE, "gradients of some layers")
        assert_close(everything, second, TOLERANCE, "gradients of all layers")


@WORLDS
@pytest.mark.parametrize("shard", [as_one_layer, nested])
def test_backward_inputs_may_be_all_chunks_and_other_leaves(shard: Any, world_size: int) -> None:
    models, plain = [mlp() for _ in range(world_size)], mlp()
    own = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True)
    torch.autograd.backward(plain(own).pow(2).mean(), inputs=[own, *plain.parameters()])

    def body(group: ThreadCommunicator) -> tuple[Tensor, dict[str, Tensor]]:
        model = shard(models[group.rank], process_group(group), ShardingPolicy())
        x, other = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True), torch.ones((), requires_grad=True)
        loss = model(x).pow(2).mean() * other
        torch.autograd.backward(loss, inputs=[x, *zero3.get_trainable_chunk(model)])
        assert x.grad is not None and other.grad is None
        return x.grad, found_in(model)

    for gradient, found in run_ranks(world_size, body):
        assert_close([gradient], [own.grad], TOLERANCE, "the input's gradient")
        assert_close(found, {name: p.grad for name, p in plain.named_parameters()}, TOLERANCE, "gradients")


def test_backward_inputs_of_all_chunks_are_what_a_backward_without_is_on_another_rank() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = in_sequence(models[group.rank], process_group(group), ShardingPolicy())
        for _ in range(2):  # the second time ranks know that way, and compare nothing
            model.zero_grad()
            loss_of(model, group.rank, 9).backward(inputs=None if group.rank == 0 else zero3.get_trainable_chunk(model))
            assert_close(found_in(model), wanted, TOLERANCE, "gradients")

    models, wanted = [mlp() for _ in range(2)], by_plain(2, [], (9,))
    run_ranks(2, body)


def test_backward_inputs_under_no_sync_and_step_guard() -> None:
    models = [mlp() for _ in range(2)]

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = in_sequence(models[group.rank], group, ShardingPolicy())
        chunks = model[1].get_trainable_chunk()  # type: ignore[index]
        for number in range(3):
            with zero3.no_sync(model) if number < 2 else nullcontext(), zero3.step_guard(model):
                torch.autograd.backward(loss_of(model, group.rank, number), inputs=chunks)
        return found_in(model)

    wanted = by_plain(2, ["1."], (0, 1, 2))
    for found in run_ranks(2, body):
        assert_close(found, wanted, TOLERANCE, "gradients")


def test_backward_inputs_of_others_are_torchs() -> None:
    model = in_sequence(mlp(), None, ShardingPolicy())
    x = torch.ones(1, WIDTH, dtype=torch.float64, requires_grad=True)
    model(x).sum().backward(inputs=x)
    assert x.grad is not None and all(chunk.grad is None for chunk in model.get_trainable_chunk())
    with pytest.raises(RuntimeError, match="cannot be empty"):
        model(x).sum().backward(inputs=[])


def test_backward_inputs_that_can_not_be_right_are_refused() -> None:
    model = in_sequence(mlp(), None, ShardingPolicy())
    zero3.param_groups(model, lambda name, info: {"decay": info.ndim > 1})
    with pytest.raises(ValueError, match=r"parts of chunks of layer .*param_groups"):
        loss_of(model, 0, 0).backward(inputs=zero3.get_trainable_chunk(model)[:1])
    mixed = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64), nn.Linear(WIDTH, WIDTH, dtype=torch.float32))
    layer = zero3.Zero3Layer(mixed)
    mixed.forward = lambda x: x * (mixed[0].weight.sum() + mixed[1].weight.sum())  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"1 of the 2 trainable chunks of layer"):
        loss_of(layer, 0, 0).backward(inputs=layer.get_trainable_chunk()[:1])
    loss_of(layer, 0, 0).backward(inputs=layer.get_trainable_chunk())
    assert all(chunk.grad is not None for chunk in layer.get_trainable_chunk())


def test_backward_inputs_leave_what_others_put_around_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def counting(inner: Callable[..., None]) -> Callable[..., None]:
        @wraps(inner)
        def outer(*args: Any, **kwargs: Any) -> None:
            seen.append(1)
            inner(*args, **kwargs)

        return outer

    for _ in range(2):
        zero3.Zero3Layer(nn.Linear(2, 2))
        monkeypatch.setattr(torch.autograd, "backward", outermost := counting(torch.autograd.backward))
    layer = zero3.Zero3Layer(nn.Linear(2, 2))
    assert torch.autograd.backward is outermost
    layer(torch.ones(1, 2)).sum().backward(inputs=layer.get_trainable_chunk())
    assert len(seen) == 2
    assert layer.get_trainable_chunk()[0].grad is not None
