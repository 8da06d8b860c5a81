"""ShardingPolicy(ignored=...): parameters that are left alone, beside those that are sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support import processes
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import TOLERANCE, Turn, assert_close, process_group, spoil
from tests.support.stacks import Stack, loss_of, stack, train
from zero3 import ParamInfo, ShardingPolicy

LEFT = ["blocks.1.up.weight", "norm.weight", "norm.bias"]


def left_alone(name: str, info: ParamInfo) -> bool:
    return name == "blocks.1.up.weight" or (info.ndim == 1 and name.startswith("norm"))


POLICY = ShardingPolicy(ignored=left_alone)


@WORLDS
@pytest.mark.parametrize("tied", [False, True])
def test_ignored_parameters_are_left_to_the_user(world_size: int, tied: bool) -> None:
    """Each rank has a gradient of its own for them, and averages it by itself: then training is that of one process."""
    models, plain = [stack(tied=tied) for _ in range(world_size)], stack(tied=tied)
    alone = [
        {name: parameter.grad for name, parameter in _trained(stack(tied=tied), rank).named_parameters()} for rank in range(world_size)
    ]
    for rank in range(world_size):
        (loss_of(plain, Turn(rank, 0, world_size)) / world_size).backward()
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    torch.optim.SGD(plain.parameters(), lr=0.1).step()

    def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        model: Stack = zero3.shard(models[group.rank], process_group=process_group(group), policy=POLICY)
        own = {name: parameter for name, parameter in model.named_parameters() if "chunk" not in name}
        assert sorted(own) == sorted(LEFT)
        assert not [p for p in own.values() if any(p is chunk for chunk in zero3.get_trainable_chunk(model))]
        train(model, Turn(group.rank, 0, world_size))
        found = {name: parameter.grad.clone() for name, parameter in own.items() if parameter.grad is not None}
        for parameter in own.values():
            group.all_reduce(parameter.grad)
            parameter.grad /= world_size
        with zero3.full_gradients(model) as reduced:
            torch.optim.SGD([*zero3.get_trainable_chunk(model), *own.values()], lr=0.1).step()
            return found, dict(reduced), zero3.full_state_dict(model, rank0_only=False)

    for rank, (found, reduced, values) in enumerate(run_ranks(world_size, body)):
        assert_close(found, {name: alone[rank][name] for name in LEFT}, TOLERANCE, "gradients of one rank alone")
        assert_close(reduced, {name: value for name, value in gradients.items() if name not in LEFT}, TOLERANCE, "reduced gradients")
        assert_close(values, plain.state_dict(), TOLERANCE, "after a step")


def _trained(model: Any, rank: int) -> Any:
    train(model, Turn(rank, 0, 1))
    return model


def test_ignored_parameters_are_neither_broadcast_nor_moved() -> None:
    models = [stack() for _ in range(2)]
    spoil(models[1])
    before = [[model.get_parameter(name) for name in LEFT] for model in models]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group, policy=POLICY)
        train(model, Turn(0, 0, 1))
        with zero3.full_params(model):
            assert all(model.get_parameter(name) is parameter for name, parameter in zip(LEFT, before[group.rank], strict=True))
            assert set(dict(model.named_parameters())) == set(dict(stack().named_parameters()))
        assert (before[group.rank][0] == 7).all() == bool(group.rank)

    run_ranks(2, body)


@WORLDS
def test_ignored_parameters_in_state_dicts_and_materialize(world_size: int) -> None:
    values = {name: torch.rand_like(value) for name, value in stack().state_dict().items()}
    models = [stack() for _ in range(world_size)]
    with torch.device("meta"):
        empty = [stack() for _ in range(world_size)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        plain = stack()
        for module in plain.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        torch.manual_seed(3)

        def body(group: ThreadCommunicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
            model = zero3.shard(models[group.rank], process_group=process_group(group), policy=POLICY)
            zero3.load_full_state_dict(model, values if group.rank == 0 else None)
            new = zero3.shard(empty[group.rank], process_group=process_group(group), policy=POLICY, device="cpu")
            zero3.materialize(new)
            return zero3.full_state_dict(model, rank0_only=False), zero3.full_state_dict(new, rank0_only=False)

        for loaded, drawn in run_ranks(world_size, body):
            assert_close(loaded, values, 0, "load_full_state_dict")
            assert_close(drawn, plain.state_dict(), 0, "materialize")


class Whole(nn.Parameter):
    """A subclass, which can't be sharded."""


def test_ignored_parameters_may_be_what_can_not_be_sharded() -> None:
    model = stack()
    model.norm.weight = Whole(model.norm.weight.data)
    with pytest.raises(ValueError, match="Whole"):
        zero3.shard(model)
    train(zero3.shard(model, policy=POLICY), Turn(0, 0, 1))
    layer = zero3.Zero3Layer(nn.Linear(2, 2), policy=ShardingPolicy(ignored=lambda name, info: name == "bias"))
    assert [name for name, _ in layer.named_parameters()] == ["trainable_chunk", "bias"]


def different(rank: int) -> ShardingPolicy:
    return ShardingPolicy(ignored=lambda name, info: name == f"blocks.{rank}.up.weight")


def failing(rank: int) -> ShardingPolicy:
    return ShardingPolicy(ignored=lambda name, info: {}[name] if rank else False)


def odd(rank: int) -> ShardingPolicy:
    return ShardingPolicy(ignored=lambda name, info: None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("policy_of", "kind", "says"),
    [
        (different, ValueError, "ranks differ in what becomes a layer"),
        (failing, ValueError, r"rank 1: ignored\('.*'\) of the policy has raised KeyError"),
        (odd, TypeError, r"ignored\('.*'\) of the policy returned None"),
    ],
    ids=["different", "raises", "no bool"],
)
def test_ignored_is_the_same_on_all_ranks(policy_of: Any, kind: type[Exception], says: str) -> None:
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        with pytest.raises(kind, match=says):
            zero3.shard(models[group.rank], process_group=group, policy=policy_of(group.rank))
        assert len(list(models[group.rank].parameters())) == len(list(stack().parameters())), "nothing has changed"

    run_ranks(2, body)


def test_ignored_must_be_a_function() -> None:
    with pytest.raises(TypeError, match="ignored must be a function"):
        ShardingPolicy(ignored="norm")  # type: ignore[arg-type]


def on_a_process(rank: processes.Rank) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model = zero3.shard(stack(), policy=POLICY)
    own = [parameter for name, parameter in model.named_parameters() if "chunk" not in name]
    optimizer = torch.optim.AdamW([*zero3.get_trainable_chunk(model), *own])
    train(model, Turn(0, 0, 1))
    optimizer.step()
    path = str(rank.scratch / "checkpoint")
    zero3.save_checkpoint(path, model)
    saved = zero3.full_state_dict(model, rank0_only=False)
    for parameter in model.parameters():
        parameter.data.zero_()
    zero3.load_checkpoint(path, model)
    assert Path(path).is_dir()
    return saved, zero3.full_state_dict(model, rank0_only=False)


def test_ignored_parameters_on_processes_and_in_checkpoints() -> None:
    plain = stack()
    train(plain, Turn(0, 0, 1))
    torch.optim.AdamW(plain.parameters()).step()
    for saved, loaded in processes.on_ranks(2, on_a_process):
        assert_close(saved, plain.state_dict(), TOLERANCE, "after a step")
        assert_close(loaded, saved, 0, "from the checkpoint")
