"""ShardingPolicy: frozen, and bad values are refused where they are written."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from zero3 import ShardingPolicy


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
