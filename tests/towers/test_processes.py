"""Towers on real ranks: gloo, meshes, files, checkpoints, and what an exchange costs beside a small gather."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.towers import TOWERS, Block, TowersLife, batch, seeing, trained, trained_sharded

NONE: tuple[str, ...] = ()
V, A = ("vision",), ("audio",)


def life_of(ranks: int, **given: Any) -> TowersLife:
    rows = [[NONE, V, A + V, V], [V + A, A + V, NONE, A], [NONE] * 4, [V, V + V, NONE, V + V + V]]
    return TowersLife([[row[:ranks]] for row in rows], **given)


def train(rank: Rank, shape: tuple[int, ...], policy: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = seeing()
    plain = copy.deepcopy(model)
    if policy.get("offload") == "files":
        policy = policy | {"offload": rank.scratch}
    life = life_of(rank.world_size, policy=zero3.ShardingPolicy(**policy), fails={(3, 0): (1, "body.vision")})
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")) if shape else None
    found = trained_sharded(life, model, mesh, rank.number)
    for name, value in trained(life, plain).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def test_two_ranks_train_as_one_process() -> None:
    on_ranks(2, train, (), {})


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "shape"), [(3, ()), (4, (2, 2)), (2, (2, 1))])
def test_more_ranks_and_meshes_train_as_one_process(ranks: int, shape: tuple[int, ...]) -> None:
    on_ranks(ranks, train, shape, {})


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{"stage": 1}, {"offload": "files"}, {"offload": "cpu"}, {"compare_every": 1}])
def test_policies_train_as_one_process(policy: dict[str, Any]) -> None:
    on_ranks(2, train, (), policy)


def save_and_load(rank: Rank) -> None:
    """Names and checkpoints are those of a model without towers."""
    life, kept = life_of(2), dict[str, torch.Tensor]()
    for number, optional in enumerate([TOWERS, (), TOWERS]):
        torch.manual_seed(number)
        model = zero3.shard(seeing(), [Block, nn.Embedding], optional=optional)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), 0.1)
        if number:
            zero3.load_full_state_dict(model, kept)
        else:
            for step in range(2):
                model(*batch(life, step, 0, rank.number)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            zero3.save_checkpoint(rank.scratch / "checkpoint", model, optimizer)
            kept = {name: value.clone() for name, value in zero3.full_state_dict(model, rank0_only=False).items()}
        if number == 2:
            with torch.no_grad():
                for chunk in zero3.get_trainable_chunk(model):
                    chunk.mul_(0.5)
            model(*batch(life, 0, 0, rank.number)).square().sum().backward()
            zero3.load_checkpoint(rank.scratch / "checkpoint", model, optimizer)
        for name, value in zero3.full_state_dict(model, rank0_only=False).items():
            assert torch.equal(value, kept[name]), name


def test_names_and_checkpoints_are_those_of_a_model_without_towers() -> None:
    on_ranks(2, save_and_load)
