"""ShardingPolicy: frozen, and bad values are refused where they are written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.models import WIDTH, mlp
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3 import ShardingPolicy
from zero3.policy import OF_THE_MODEL


def test_shardingpolicy_defaults_are_what_zero_3_is() -> None:
    assert ShardingPolicy() == ShardingPolicy(
        gradient_reduction="mean", reshard_after_forward=True, prefetch_depth=1, separate_backup_group=False
    )


@pytest.mark.parametrize(
    "chosen", [{"gradient_reduction": "sum"}, {"reshard_after_forward": False}, {"prefetch_depth": 0}, {"prefetch_depth": 9}]
)
def test_shardingpolicy_keeps_a_choice(chosen: dict[str, Any]) -> None:
    assert dataclasses.asdict(ShardingPolicy(**chosen)) == {**dataclasses.asdict(ShardingPolicy()), **chosen}


@pytest.mark.parametrize(
    ("chosen", "error", "says"),
    [
        ({"gradient_reduction": "average"}, ValueError, "gradient_reduction must be 'mean' or 'sum', found 'average'"),
        ({"gradient_reduction": None}, ValueError, "gradient_reduction must be 'mean' or 'sum', found None"),
        ({"reshard_after_forward": 1}, TypeError, "reshard_after_forward must be True or False, found 1"),
        ({"reshard_after_forward": "no"}, TypeError, "reshard_after_forward must be True or False, found 'no'"),
        ({"separate_backup_group": None}, TypeError, "separate_backup_group must be True or False, found None"),
        ({"prefetch_depth": -1}, ValueError, "prefetch_depth must be 0 or more, found -1"),
        ({"prefetch_depth": 1.0}, TypeError, "prefetch_depth must be an integer, found 1.0"),
        ({"stage": 2.0}, ValueError, "stage must be 1, 2 or 3, found 2.0"),
        ({"prefetch_depth": True}, TypeError, "prefetch_depth must be an integer, found True"),
    ],
)
def test_shardingpolicy_refuses_a_bad_value_with_what_was_found(chosen: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        ShardingPolicy(**chosen)
    assert str(caught.value) == says


def test_shardingpolicy_takes_the_least_values() -> None:
    policy = ShardingPolicy(prefetch_depth=0, compare_every=0, stage=1)
    assert (policy.prefetch_depth, policy.compare_every, policy.stage) == (0, 0, 1)


def test_shardingpolicy_never_changes() -> None:
    policy = ShardingPolicy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.prefetch_depth = 2  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        policy.no_such_field = 2  # type: ignore[attr-defined]
    assert hash(policy) == hash(ShardingPolicy())


# -- layers with policies of their own

OTHER: dict[str, Any] = {
    "dynamic": True, "gradient_reduction": "sum", "prefetch_depth": 0, "separate_backup_group": True, "transactional": True,
    "compare_every": 1, "resident_bytes": 5,
}  # fmt: skip


def by_name(chosen: Callable[[str], ShardingPolicy]) -> Callable[[list[nn.Module], Any], Any]:
    return lambda modules, group: zero3.shard(
        nn.Sequential(*modules), modules, policy=lambda name, module: chosen(name), process_group=group
    )


def in_sequential(modules: list[nn.Module], group: Any, policies: list[ShardingPolicy]) -> Any:
    return zero3.Zero3Sequential(
        [zero3.Zero3Layer(module, policy=policy, process_group=group) for module, policy in zip(modules, policies, strict=True)]
    )


def nested(modules: list[nn.Module], group: Any, policies: list[ShardingPolicy]) -> Any:
    model = nn.Sequential(zero3.Zero3Layer(modules[0], policy=policies[0], process_group=group), *modules[1:])
    return zero3.Zero3Layer(model, policy=policies[1], process_group=group)


def alone(modules: list[nn.Module], group: Any, policies: list[ShardingPolicy]) -> Any:
    """A plain module calls them: that they are of one model is seen at the first forward."""
    model = nn.Sequential(
        *(zero3.Zero3Layer(module, policy=policy, process_group=group) for module, policy in zip(modules, policies, strict=True))
    )
    return model(torch.ones(2, WIDTH, dtype=torch.float64))


WRAPPED: dict[str, Callable[[list[nn.Module], Any, ShardingPolicy, ShardingPolicy], Any]] = {
    "blocks": lambda m, group, one, other: by_name(lambda name: other if name else one)(m, group),
    "a block": lambda m, group, one, other: by_name(lambda name: other if name == "1" else one)(m, group),
    "the root": lambda m, group, one, other: by_name(lambda name: one if name else other)(m, group),
    "Zero3Sequential": lambda m, group, one, other: in_sequential(m, group, [one, other, one]),
    "around a layer": lambda m, group, one, other: nested(m, group, [one, other]),
    "in a plain module": lambda m, group, one, other: alone(m, group, [one, one, other]),
}


@pytest.mark.parametrize("field", OF_THE_MODEL)
@pytest.mark.parametrize("where", WRAPPED)
def test_a_field_of_the_whole_model_is_the_same_for_all_layers(field: str, where: str) -> None:
    """It would count for some, and be shown for others. Every rank is told, and under `shard` nothing has changed."""
    models = [list(mlp()) for _ in range(2)]
    names = [[name for name, _ in nn.Sequential(*model).named_parameters()] for model in models]

    def body(group: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=rf"has {field}=.* has {field}=.* counts for the whole model") as caught:
            WRAPPED[where](models[group.rank], group, ShardingPolicy(), ShardingPolicy(**{field: OTHER[field]}))
        assert field in str(caught.value) and repr(OTHER[field]) in str(caught.value)
        if where in ("blocks", "a block", "the root"):
            assert [name for name, _ in nn.Sequential(*models[group.rank]).named_parameters()] == names[group.rank]

    run_ranks(2, body)


def test_a_field_of_the_whole_model_that_one_rank_alone_has_given_to_some_layers() -> None:
    models = [list(mlp()) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        special = ShardingPolicy(prefetch_depth=2) if group.rank else ShardingPolicy()
        with pytest.raises(ValueError, match=r"rank 1: .*prefetch_depth=2"):
            by_name(lambda name: special if name == "1" else ShardingPolicy())(models[group.rank], group)

    run_ranks(2, body)


class Odd(nn.Parameter):
    """A subclass, which can't be sharded."""


def test_a_policy_by_name_may_ignore_what_can_not_be_sharded() -> None:
    model = mlp()
    weight = next(name for name, _ in model[1].named_parameters())
    owner = model[1].get_submodule(weight.rpartition(".")[0])
    owner._parameters[weight.rpartition(".")[2]] = Odd(owner._parameters[weight.rpartition(".")[2]].data)
    with pytest.raises(ValueError, match="Odd"):
        zero3.shard(model, list(model), policy=lambda name, module: ShardingPolicy())
    left = ShardingPolicy(ignored=lambda name, info: name == f"1.{weight}")
    zero3.shard(model, list(model), policy=lambda name, module: left if name == "1" else ShardingPolicy())
    assert isinstance(dict(model.named_parameters())[f"1.{weight}"], Odd)
