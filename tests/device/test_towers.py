"""Towers on the simulated device: in an order of streams that a seed draws, ranks that call them as they like are as one process."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch

from tests.support.towers import TowersLife, drawn_life, seeing, trained, trained_sharded
from zero3 import ShardingPolicy

POLICIES = [{}, {}, {"stage": 1}, {"stage": 2}, {"offload": "cpu"}, {"reshard_after_forward": False}, {"prefetch_depth": 2}]


def drawn(seed: int) -> TowersLife:
    """Ranks are threads of one device here, so failures, which leave transfers behind, and delays stand elsewhere."""
    life, dice = drawn_life(seed), random.Random(seed)
    life.fails, life.delays, life.policy = {}, None, ShardingPolicy(**dice.choice(POLICIES))
    return life


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 2)) for seed in range(24)])
def test_towers_in_any_order_of_streams_are_as_one_process(seed: int) -> None:
    from tests.device import simulated
    from tests.device.ranks import run_ranks

    life, dice = drawn(seed), random.Random(-seed)
    torch.manual_seed(0)
    model = seeing()
    life.prepare(model)
    models = [copy.deepcopy(model) for _ in range(life.ranks)]
    body: Callable[[int], dict[str, torch.Tensor]]
    body = lambda rank: trained_sharded(life, models[rank], None, rank, f"cuda:{rank}")  # noqa: E731
    policy, memory = dice.choice([*simulated.POLICIES, "demand"]), dice.choice(["strict", "exact"])
    simulated.schedule(policy, seed, progress=dice.choice([0.0, 0.05, 0.3]), memory=memory)
    try:
        found = run_ranks(life.ranks, body)
    finally:
        simulated.recover()
    for values in found:
        for name, value in trained(life, copy.deepcopy(model)).items():
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-9)
