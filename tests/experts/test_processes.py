"""Experts at home on real ranks: meshes, tokens that go through gloo, the bytes that travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.support.experts import Training, made
from tests.support.processes import Rank, on_ranks


class Group:
    """What `Training` asks of a group."""

    def __init__(self, rank: Rank, mesh: Any = None) -> None:
        self.rank, self.world_size, self.mesh = rank.number, rank.world_size, mesh


def mesh_of(names: tuple[str, ...], *shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def prepared(checkpoints: str) -> Any:
    def prepare(model: Any) -> None:
        model.checkpoints = checkpoints

    return prepare


def is_base(name: str, info: Any) -> bool:
    return name.endswith(("experts.up", "experts.down"))


def quantised(rank: Rank, names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Ranks of `dp_shard` cut the bytes of a block of experts anywhere."""

    def frozen(model: Any) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not is_base(name, None))

    policy = zero3.ShardingPolicy(expert_parallel=True, quantize=zero3.Int8(block_size=16, select=is_base))
    training = Training(Group(rank, mesh_of(names, *shape)), policy, prepare=frozen).train(2, micros=2, keeps=True).check()
    zero3.save_checkpoint(rank.scratch / "checkpoint", training.model, training.optimizer)
    zero3.load_checkpoint(rank.scratch / "checkpoint", training.model, training.optimizer)
    training.train(1, first=4).check()


def train(rank: Rank, names: tuple[str, ...], shape: tuple[int, ...], checkpoints: str, policy: dict[str, Any]) -> list[int]:
    mesh = mesh_of(names, *shape) if names else None
    training = Training(Group(rank, mesh), zero3.ShardingPolicy(expert_parallel=True, **policy), prepare=prepared(checkpoints))
    training.train(2, micros=2, keeps=True).train(2, first=2).check()
    zero3.save_checkpoint(rank.scratch / "checkpoint", training.model, training.optimizer)
    zero3.load_checkpoint(rank.scratch / "checkpoint", training.model, training.optimizer)
    training.train(1, first=4).check()
    return [chunk.numel() for chunk in zero3.get_trainable_chunk(training.model)]


DEALT, REPLICAS = ("dp_shard", "ep"), ("dp_replicate", "dp_shard")


@pytest.mark.slow
@pytest.mark.parametrize("checkpoints", ["", "reentrant", "not reentrant"])
@pytest.mark.parametrize(("names", "shape"), [((), (3,)), (DEALT, (2, 2)), (REPLICAS, (2, 2)), (DEALT, (1, 2)), (DEALT, (2, 1))])
def test_meshes_train_as_one_process(names: tuple[str, ...], shape: tuple[int, ...], checkpoints: str) -> None:
    ranks = 1
    for each in shape:
        ranks *= each
    on_ranks(ranks, train, names, shape, checkpoints, {})


@pytest.mark.slow
@pytest.mark.parametrize(("names", "shape"), [(DEALT, (2, 2)), (REPLICAS, (2, 2))])
def test_quantised_experts_on_meshes(names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    on_ranks(4, quantised, names, shape)


def outside(rank: Rank) -> None:
    """Where slices of experts stand in the order of blocks, and those of all else, and of what experts share, in that of ranks."""
    mesh, policy = mesh_of(DEALT, 2, 2), zero3.ShardingPolicy(expert_parallel=True)

    def options(name: str, info: Any) -> dict[str, Any]:
        apart = {"whole": True} if "norm.weight" in name else {"align": 2} if "norm.bias" in name else {}
        return {"weight_decay": 0.1 * info.ndim, **apart}

    training = Training(Group(rank, mesh), policy)
    training.optimizer = torch.optim.AdamW(zero3.param_groups(training.model, options), lr=0.02)
    decays = [{"params": [p], "weight_decay": 0.1 * p.ndim} for p in training.plain.parameters()]
    training.of_plain = torch.optim.AdamW(decays, lr=0.02)
    training.train(2).check()
    training.micro(4)
    for part, plain in ((training.model, training.plain), (training.model.blocks[1].experts, training.plain.blocks[1].experts)):
        with zero3.full_gradients(part, writeback=True) as gradients:
            for number, (name, parameter) in enumerate(plain.named_parameters()):
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-9)
                for gradient in (gradients[name], parameter.grad):
                    gradient.mul_(2 + number)
    training.step()
    training.check()
    training = Training(Group(rank, mesh), policy)
    for name, parameter in training.plain.named_parameters():
        parameter.requires_grad_("norm.bias" not in name)
    zero3.set_trainable(training.model, lambda name, info: "norm.bias" not in name)
    training.optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(training.model), lr=0.02)
    training.train(2).check()


def drawn(rank: Rank) -> None:
    mesh, policy = mesh_of(DEALT, 2, 2), zero3.ShardingPolicy(expert_parallel=True)

    def init(module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            torch.nn.init.normal_(parameter)

    plain, model = made(), made().to("meta")
    torch.manual_seed(5)
    plain.apply(init)
    zero3.shard(model, [*model.blocks], policy=policy, process_group=mesh, device=torch.device("cpu"))
    torch.manual_seed(5)
    zero3.materialize(model, init)
    for name, value in zero3.full_state_dict(model, rank0_only=False).items():
        assert torch.equal(value, plain.state_dict()[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("body", [outside, drawn])
def test_outside_of_compute_slices_of_experts_have_their_own_order(body: Any) -> None:
    on_ranks(4, body)


def refused_without_the_policy(rank: Rank) -> None:
    mesh = mesh_of(DEALT, 1, 2)
    for build in (zero3.Zero3Layer, zero3.shard):
        with pytest.raises(ValueError, match=r'"ep".*expert_parallel=True'):
            build(made(), process_group=mesh)
    with pytest.raises(ValueError, match=r"expert_parallel=True.*'ep'"):
        zero3.shard(made(), process_group=mesh_of(("dp_replicate", *DEALT), 1, 1, 2), policy=zero3.ShardingPolicy(expert_parallel=True))


def test_a_mesh_for_experts_without_the_policy_is_refused() -> None:
    on_ranks(2, refused_without_the_policy)
