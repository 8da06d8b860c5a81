"""Pairs of those capabilities that touch streams: on the simulated device, in an order drawn by seed, they are as in one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.device.training import scratch
from tests.pairs.covering import covering, live_together
from tests.pairs.exceptions import Names, all_pairs, is_free
from tests.pairs.life import Life, Place, World, live
from tests.pairs.rows import ROWS

PAIRS = [pair for pair in all_pairs() if all(ROWS[name].streams for name in pair) and is_free(pair)]
PART = 10  # `make test` leads one life of so many
LIVES = [
    pytest.param(life, marks=[pytest.mark.slow] * (number % PART > 0), id=" + ".join(life)) for number, life in enumerate(covering(PAIRS))
]


def launch(world: World, body: Callable[[Place], Any], parts: int = 1) -> list[Any]:
    from tests.device.ranks import run_ranks

    size = ranks_in(world)

    def rank(number: int) -> Any:
        return body(Place(number, size, mesh_of(world, parts), torch.device("cuda", number)))

    return run_ranks(size, rank)


def ranks_in(world: World) -> int:
    return max(1, world[0]) * world[1]


def mesh_of(world: World, parts: int, device: str = "cuda") -> Any:
    """None where the default group will do."""
    replicas, shards = world
    if not replicas and parts == 1:
        return None
    sizes = [*([replicas] if replicas else []), shards // parts, parts][: 3 if parts > 1 else 2]
    names = ("dp_replicate", "dp_shard", "sp")[not replicas : 3 if parts > 1 else 2]
    return init_device_mesh(device, tuple(sizes), mesh_dim_names=names)


def life_of(names: Names, seed: int = 0) -> Life:
    # where tokens travel, a rank that fails has to have seen a micro-batch of its kind with prefetching, too: that moves gathers among them
    epochs = 3 if "step_guard failing" in names and any(name.startswith(("expert_parallel", "sequences")) for name in names) else 2
    return Life([row for name, row in ROWS.items() if name in names], seed, epochs=epochs)


def lead(names: Names, seed: int) -> None:
    from tests.device import simulated

    life = life_of(names, seed)
    dice, folder = life.dice("schedule"), scratch()
    policy, memory = dice.choice([*simulated.POLICIES, "demand"]), dice.choice(["strict", "exact"])
    simulated.schedule(policy, seed, progress=dice.choice([0.0, 0.05, 0.3]), memory=memory)
    try:
        live(life, launch, folder)
    finally:
        simulated.recover()
        shutil.rmtree(folder)


@pytest.mark.parametrize("names", LIVES)
def test_all_pairs_live_on_the_device_as_in_one_process(names: Names) -> None:
    live_together(names, partial(lead, seed=0))
