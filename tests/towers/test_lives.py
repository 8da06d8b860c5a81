"""Ranks as threads that call towers from 0 to 3 times, in other orders: the numbers of one plain process with all ranks' data."""

from __future__ import annotations

import pytest

import zero3
from tests.support.towers import POLICIES, PREPARED, TowersLife, check_life, drawn_life

NONE: tuple[str, ...] = ()
V, A = ("vision",), ("audio",)
MIXED = [
    [[NONE, V]],  # text on one rank, an image on another
    [[V + V, A]],  # an image and a video, a sound
    [[NONE, NONE]],
    [[V + A, A + V]],  # in opposite orders
    [[V + A + V, A + A + V]],
    [[A, NONE]],
]
THREE = [[[NONE, V, A]], [[V + A, A + V, NONE]], [[NONE] * 3], [[V, V + V, V + V + V]]]
TWO_MICROS = [[[V, NONE], [NONE, A]], [[NONE, NONE], [A + V, V]], [[V, V], [NONE, NONE]]]


@pytest.mark.parametrize("prepared", PREPARED)
def test_what_trains_and_what_is_checkpointed(prepared: str) -> None:
    check_life(TowersLife(MIXED, prepare=PREPARED[prepared]))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: str) -> None:
    check_life(TowersLife(THREE, zero3.ShardingPolicy(**POLICIES[policy])))


@pytest.mark.parametrize("ranks", [1, 4])
def test_one_rank_and_four(ranks: int) -> None:
    check_life(TowersLife([[[V, NONE, A + V, V + V][:ranks]], [[NONE] * ranks], [[A + V, V, NONE, A][:ranks]]]))


@pytest.mark.parametrize("how", ["accumulated", "no_sync", "together", "clipped"])
def test_several_micro_batches(how: str) -> None:
    check_life(TowersLife(TWO_MICROS, keeps=how == "no_sync", together=how == "together", clip=0.1 if how == "clipped" else None))


@pytest.mark.parametrize("first", [True, False], ids=["in the first call", "in a later call"])
def test_a_rank_that_raises_in_a_tower_is_an_error_on_all_and_the_next_step_is_right(first: bool) -> None:
    calls = [[[V, V]], [[NONE, A + V]], [[A, A]], [[V, V]]]
    check_life(TowersLife(calls, fails={(0 if first else 1, 0): (1, "body.vision")}))


@pytest.mark.parametrize("seed", range(12))
def test_drawn_lives(seed: int) -> None:
    check_life(drawn_life(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 108))
def test_more_drawn_lives(seed: int) -> None:
    for number in range(25):
        check_life(drawn_life(1000 * seed + number))
