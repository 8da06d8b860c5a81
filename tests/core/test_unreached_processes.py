"""Parameters that no gradient reached, on real processes with gloo: through shared memory, through sockets, on a mesh."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.reference import assert_close
from tests.support.unreached import Plain, adamw, alone, apart, changing, chunks_of, kept, net, seldom, sgd, train
from zero3 import ShardingPolicy

WAYS: dict[str, Any] = {  # what computes, what the optimizer gets, which it is, micro-batches, what is around them
    "chunks": (seldom, chunks_of, adamw, 1, alone),
    "no_sync": (seldom, chunks_of, sgd, 2, kept),
    "aligned": (changing, apart, adamw, 1, alone),
}


def on_gloo(rank: Rank, way: str, mesh: bool, near: bool) -> Any:
    use, groups, make, micros, around = WAYS[way]
    with patch.dict(os.environ, {"ZERO3_HOST_MEMORY": str(int(near))}):
        group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")) if mesh else None
        place = group, ShardingPolicy(), rank.number, rank.world_size
        nothing, model, _ = train(place, net(), use, (groups, make), micros, around)
        return nothing, zero3.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize(
    ("way", "ranks", "mesh", "near"),
    [
        ("chunks", 2, False, True),
        pytest.param("chunks", 3, False, False, marks=pytest.mark.slow),
        pytest.param("no_sync", 2, False, False, marks=pytest.mark.slow),
        pytest.param("aligned", 3, False, True, marks=pytest.mark.slow),
        ("chunks", 4, True, True),
        pytest.param("no_sync", 4, True, False, marks=pytest.mark.slow),
    ],
)
def test_unreached_parameters_on_gloo(way: str, ranks: int, mesh: bool, near: bool) -> None:
    use, _, make, micros, _ = WAYS[way]
    plain = Plain(ranks, use, make, micros)
    for nothing, values in on_ranks(ranks, on_gloo, way, mesh, near):
        assert nothing == plain.nothing
        assert_close(values, plain.model.state_dict(), 1e-9, "parameters")
