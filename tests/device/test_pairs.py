"""Pairs of those capabilities that touch streams: on the simulated device, in an order drawn by seed, they are as in one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.device.training import scratch
from tests.pairs.exceptions import Names, all_pairs, is_free
from tests.pairs.life import Life, Place, World, live
from tests.pairs.rows import ROWS

PART = 10  # `make test` tries one pair of so many
PAIRS = [pair for pair in all_pairs() if all(ROWS[name].streams for name in pair) and is_free(pair)]
OF = {name: [pair for pair in PAIRS if pair[0] == name] for name in ROWS}


def launch(world: World, body: Callable[[Place], Any]) -> list[Any]:
    from tests.device.ranks import run_ranks

    replicas, shards = world
    size = max(1, replicas) * shards

    def rank(number: int) -> Any:
        device = torch.device("cuda", number)
        mesh = init_device_mesh("cuda", world, mesh_dim_names=("dp_replicate", "dp_shard")) if replicas else None
        return body(Place(number, size, mesh, device))

    return run_ranks(size, rank)


def lead(names: Names, seed: int) -> None:
    from tests.device import simulated

    life = Life([row for name, row in ROWS.items() if name in names], seed, epochs=2)
    dice, folder = life.dice("schedule"), scratch()
    policy, memory = dice.choice([*simulated.POLICIES, "demand"]), dice.choice(["strict", "exact"])
    simulated.schedule(policy, seed, progress=dice.choice([0.0, 0.05, 0.3]), memory=memory)
    try:
        live(life, launch, folder)
    finally:
        simulated.recover()
        shutil.rmtree(folder)


def wrong(pairs: list[Names], seed: int) -> list[str]:
    found = []
    for pair in pairs:
        try:
            lead(pair, seed)
        except Exception as error:
            found.append(f"{' + '.join(pair)}: {type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("name", [name for name in OF if OF[name]])
def test_pairs_on_the_device_of(name: str) -> None:
    assert not wrong(OF[name][list(ROWS).index(name) % PART :: PART], 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in OF if OF[name]])
def test_other_pairs_on_the_device_of(name: str) -> None:
    others = [pair for number, pair in enumerate(OF[name]) if number % PART != list(ROWS).index(name) % PART]
    assert not wrong(others, 1)
