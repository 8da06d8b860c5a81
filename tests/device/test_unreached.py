"""Parameters that no gradient reached, where streams order everything: in any order that events allow, and who waits for what."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.support.reference import assert_close
from tests.support.unreached import STEPS, Block, Plain, Use, adamw, batch, net, seldom
from zero3 import Int8, ShardingPolicy


def both(block: int, step: int, rank: int, ranks: int) -> set[str]:
    return {"a", "b"}


def train(rank: int, model: Any, group: Any, ranks: int, use: Use, policy: ShardingPolicy, told: Any = None) -> Any:
    device = torch.device("cuda", rank)
    modules = list(model.blocks)
    zero3.shard(model, Block, device=device, policy=policy, process_group=group)
    optimizer = adamw(zero3.get_trainable_chunk(model))
    batches = [batch(step, 0, rank).to(device) for step in range(STEPS)]
    for step, x in enumerate(batches):
        for number, block in enumerate(modules):
            block.use = use(number, step, rank, ranks)
        loss = model(x).pow(2).sum()
        if told is not None:
            told(step, "forward")
        loss.backward()
        if told is not None:
            told(step, "backward")
        optimizer.step()
        optimizer.zero_grad()
        if told is not None:
            told(step, "step")
    return {name: value.cpu() for name, value in zero3.full_state_dict(model, rank0_only=False).items()}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("world", [(0, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("fields", [{}, {"offload": "cpu"}, {"prefetch_depth": 2}, {"reduce_format": Int8(block_size=1)}], ids=str)
def test_unreached_parameters_in_any_order_of_streams(fields: dict[str, Any], world: tuple[int, int], seed: int) -> None:
    from tests.device import simulated
    from tests.device.ranks import run_ranks

    ranks = max(1, world[0]) * world[1]
    plain, models = Plain(ranks, seldom, adamw), [net() for _ in range(ranks)]
    simulated.schedule(["random", "lanes"][seed], seed, progress=0.1)

    def body(rank: int) -> Any:
        mesh = init_device_mesh("cuda", world, mesh_dim_names=("dp_replicate", "dp_shard")) if world[0] else None
        return train(rank, models[rank], mesh, ranks, seldom, ShardingPolicy(**fields))

    for values in run_ranks(ranks, body):
        if "reduce_format" not in fields:
            assert_close(values, plain.model.state_dict(), 1e-9, "parameters")
        else:
            for name in set.intersection(*plain.nothing):  # codes round all others
                assert torch.equal(values[name], plain.model.state_dict()[name])


@pytest.mark.parametrize(("use", "waiting"), [(both, set()), (lambda block, step, rank, ranks: {"a", "b"} if rank else {"a"}, {0})])
def test_a_host_waits_only_for_slots_that_its_own_rank_has_not_reached(use: Use, waiting: set[int]) -> None:
    """And only at the end of backward."""
    from tests.device import simulated
    from tests.device.ranks import run_ranks

    simulated.schedule("random", 5)
    turn = threading.Barrier(2)
    models, found = [net() for _ in range(2)], []

    def told(step: int, when: str) -> None:
        if turn.wait() == 0:
            found.append((step, when, list(simulated.C.waits())))
        turn.wait()

    def body(rank: int) -> Any:
        return train(rank, models[rank], None, 2, use, ShardingPolicy(), told)

    run_ranks(2, body)
    steady: list[tuple[int, str, list[Any]]] = [each for each in found if each[0] > 1]
    assert {when for _, when, waits in steady if waits} == ({"backward"} if waiting else set()), steady
