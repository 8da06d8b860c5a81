"""param_groups at the wrong time, or with wrong answers: one error on all ranks, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.inside import chunks_of
from tests.support.param_groups import WORLDS, Options, all_whole, as_layers, build, by_name, make, matrices_whole
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.training import loss_of, sentences

MISTAKES: dict[str, tuple[Callable[[int], Options], str]] = {
    "other options on one rank": (lambda rank: lambda name, info: {"lr": 0.1 + (rank == 1 and "bias" in name)}, "options of 1.norm.bias"),
    "left out on one rank": (lambda rank: lambda name, info: None if rank else {}, "options of"),
    "whole on one rank": (lambda rank: lambda name, info: {"whole": rank == 0}, "options of"),
    "no dict": (lambda rank: lambda name, info: 0.1 if rank else {}, "expected a dict"),
    "params": (lambda rank: lambda name, info: {"params": []}, "params"),
    "whole is no bool": (lambda rank: lambda name, info: {"whole": 1}, "expected True or False"),
    "the callable raises": (lambda rank: lambda name, info: {} if rank else {"lr": {}[name]}, "0.weight"),
}


def snapshot(model: nn.Module) -> list[Any]:
    return [(name, id(p), p.detach().clone()) for name, p in model.named_parameters()]


def same_snapshot(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x[:2] == y[:2] and torch.equal(x[2], y[2]) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_on_one_rank_is_an_error_on_all_and_changes_nothing(name: str) -> None:
    make_options, text = MISTAKES[name]

    def body(group: ThreadCommunicator) -> str:
        model = as_layers(group, models[group.rank])
        before = snapshot(model)
        with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
            zero3.param_groups(model, make_options(group.rank))
        assert same_snapshot(before, snapshot(model))
        return f"{type(caught.value).__name__}: {caught.value}"

    models = [build(rank) for rank in range(2)]
    first, second = run_ranks(2, body)
    assert first == second and text in first


@WORLDS
def test_a_call_at_the_wrong_time_is_refused(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = as_layers(group, models[group.rank])
        with zero3.full_params(model), pytest.raises(RuntimeError, match="fetched"):
            zero3.param_groups(model, all_whole)
        loss_of(model, sentences(0)).backward()
        with pytest.raises(RuntimeError, match="has gradients"):
            zero3.param_groups(model, all_whole)
        model.zero_grad()
        zero3.param_groups(model, all_whole)

    models = [build(rank) for rank in range(world_size)]
    run_ranks(world_size, body)


@WORLDS
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_call_of_param_groups_while_a_layer_computes_is_refused(when: str, number: int, world_size: int) -> None:
    """Its full parameters are in use, so its chunk can't be cut anew."""

    def body(group: ThreadCommunicator) -> None:
        model = as_layers(group, models[group.rank])
        before, refused = snapshot(model), []

        def divide(*_: object) -> None:
            with pytest.raises(RuntimeError, match=r"param_groups while layer '\d'.* is fetched: call it outside of forward, backward"):
                zero3.param_groups(model, all_whole)
            refused.append(when)

        module = list(model)[number].module
        hook = module.register_forward_hook(divide) if when == "forward" else module.register_full_backward_pre_hook(divide)
        loss_of(model, sentences(0)).backward()
        hook.remove()
        model.zero_grad()
        assert refused == [when] and same_snapshot(before, snapshot(model))
        zero3.param_groups(model, all_whole)

    models = [build(rank) for rank in range(world_size)]
    run_ranks(world_size, body)


@WORLDS
@pytest.mark.parametrize("first", [None, by_name, all_whole], ids=["chunks", "by name", "whole"])
def test_an_optimizer_made_before_a_division_says_so(world_size: int, first: Options | None) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = as_layers(group, models[group.rank])
        old = make(zero3.param_groups(model, first) if first else [{"params": model.get_trainable_chunk()}])
        zero3.param_groups(model, matrices_whole)
        loss_of(model, sentences(0)).backward()
        for use in (old.step, old.zero_grad):
            if any(p.numel() for g in old.param_groups for p in g["params"]):
                with pytest.raises(RuntimeError, match="no parameter of the model any more"):
                    use()

    models = [build(rank) for rank in range(world_size)]
    run_ranks(world_size, body)


def test_a_gathering_that_fails_changes_nothing_on_any_rank() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = as_layers(group, models[group.rank])
        before, count = snapshot(model), [0]

        def fail(kind: str) -> None:
            count[0] += 1
            if count[0] == 3 and group.rank == 1:
                error = RuntimeError("the cable is out")
                group.world.fail(error)  # so that the other one need not wait for a timeout
                raise error

        group.before = fail
        with pytest.raises(RuntimeError):
            zero3.param_groups(model, all_whole)
        assert count[0] == 3
        assert same_snapshot(before, snapshot(model))
        assert all(chunk.layout.bounds is None for chunk in chunks_of(model))

    models = [build(rank) for rank in range(2)]
    run_ranks(2, body)
