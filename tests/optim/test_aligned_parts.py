"""Aligned parts: state in blocks is that of the unsharded optimizer's, to the bit, at any number of ranks, in checkpoints too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.blocks import BLOCK, Block, InBlocks, Parts, assert_equal, go, own, together
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.stories import bytes_of

SHAPES = [(16, 8), (9, 7), (5,), (31,), (32,), (128,), (3, 64), (63, 2), (), (0,), (1,)]
ALIGNED = {"align": BLOCK}


def sharded(group: ThreadCommunicator, options: Any = ALIGNED, **fields: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    policy = zero3.ShardingPolicy(gradient_reduction="sum", **fields)
    model = zero3.shard(Parts(SHAPES), layers=Block, policy=policy, process_group=group if group.world_size > 1 else None)
    return model, InBlocks(zero3.param_groups(model, lambda name, info: options))


def plainly() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Parts(SHAPES)
    return model, InBlocks(model.parameters())


def state_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [optimizer.state[p] for p in optimizer.param_groups[0]["params"]]


@WORLDS
@pytest.mark.parametrize("fields", [{}, {"stage": 2}, {"offload": "cpu"}, {"gather_format": zero3.Int8()}], ids=str)
def test_blocks_are_those_of_the_uncut_parameter(world_size: int, fields: dict[str, Any]) -> None:
    def body(group: ThreadCommunicator) -> dict[str, Any]:
        model, optimizer = sharded(group, **fields)
        zero3.check_optimizer(model, optimizer)
        go(model, optimizer, range(3), own(group.rank, world_size))
        assert_equal(model, plain, str(fields))
        return zero3.full_optimizer_state_dict(model, optimizer)

    plain, reference = plainly()
    go(plain, reference, range(3), together)
    full = run_ranks(world_size, body)[0]
    for (name, _), expected in zip(plain.named_parameters(), state_of(reference), strict=True):
        assert full["state"][name].keys() == expected.keys()
        for key, value in expected.items():
            found = full["state"][name][key]
            assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, f"{key} of {name}"
    assert full["param_groups"] == [{"lr": 0.05, "momentum": 0.5, "params": [name for name, _ in plain.named_parameters()]}]


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 4), (4, 2), (3, 2)])
@pytest.mark.parametrize("how", ["aligned", "from whole", "to whole"])
def test_a_checkpoint_goes_on_at_any_number_of_ranks(how: str, before: int, after: int, tmp_path: Path) -> None:
    """Also between aligned parts and whole parameters: `align` and `whole` are no part of it."""

    def save(group: ThreadCommunicator) -> None:
        model, optimizer = sharded(group, {"whole": True} if how == "from whole" else ALIGNED)
        go(model, optimizer, range(2), own(group.rank, before))
        zero3.save_checkpoint(tmp_path / "run", model, optimizer)

    def load(group: ThreadCommunicator) -> None:
        model, optimizer = sharded(group, {"whole": True} if how == "to whole" else ALIGNED)
        zero3.load_checkpoint(tmp_path / "run", model, optimizer)
        assert "align" in optimizer.param_groups[0] or how == "to whole"
        go(model, optimizer, range(2, 4), own(group.rank, after))
        assert_equal(model, plain, how)

    plain, reference = plainly()
    go(plain, reference, range(4), together)
    run_ranks(before, save)
    run_ranks(after, load)


@WORLDS
def test_a_plain_run_goes_on_sharded(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        model, optimizer = sharded(group)
        zero3.load_full_state_dict(model, values)
        zero3.load_full_optimizer_state_dict(model, optimizer, full if group.rank == 0 else None)
        go(model, optimizer, range(2, 4), own(group.rank, world_size))
        assert_equal(model, plain, "later")

    (before, kept), (plain, reference) = plainly(), plainly()
    go(before, kept, range(2), together)
    go(plain, reference, range(4), together)
    names, values = [name for name, _ in before.named_parameters()], before.state_dict()
    full = {"state": dict(zip(names, state_of(kept), strict=True)), "param_groups": [{"lr": 0.05, "momentum": 0.5, "params": names}]}
    run_ranks(world_size, body)


@pytest.mark.parametrize("some", [False, True])
def test_a_layer_makes_as_many_transfers_as_without(some: bool) -> None:
    def step(group: ThreadCommunicator, options: Any) -> tuple[list[str], dict[str, int]]:
        policy = zero3.ShardingPolicy(gradient_reduction="sum")
        model = zero3.shard(Parts(SHAPES), layers=Block, policy=policy, process_group=group)
        zero3.param_groups(model, options)
        for _ in range(2):
            group.log.clear()
            model(own(group.rank, 3)(0)).backward()
        return [each.kind for each in group.log], bytes_of(group.log)

    def aligned(name: str, info: zero3.ParamInfo) -> dict[str, Any]:
        return {"align": BLOCK} if info.ndim == 2 or not some else {"lr": 0.1}

    for (kinds, sent), (as_before, before) in zip(
        run_ranks(3, lambda group: step(group, aligned)),
        run_ranks(3, lambda group: step(group, lambda name, info: {"lr": 0.1 if info.ndim == 2 else 0.2})),
        strict=True,
    ):
        assert kinds == as_before
        assert all(sent[kind] <= before[kind] for kind in before), "padding is left out"


@pytest.mark.parametrize("n", [0, -1, 2.0, "256", True, None])
def test_an_align_that_is_no_length_is_refused_on_all_ranks(n: Any) -> None:
    def body(group: ThreadCommunicator) -> str:
        model = zero3.shard(Parts(SHAPES), layers=Block, process_group=group)
        with pytest.raises(
            ValueError, match=r"options\('blocks\.0\.parts\.0\.value'\) returned align=.*, expected a positive int"
        ) as error:
            zero3.param_groups(model, lambda name, info: {"align": n if group.rank else 2})
        return str(error.value)

    assert len(set(run_ranks(2, body))) == 1


def test_align_of_whole_parameters_is_refused() -> None:
    model = zero3.shard(Parts(SHAPES), layers=Block)
    with pytest.raises(ValueError, match="returned align=256 with whole=True"):
        zero3.param_groups(model, lambda name, info: {"align": 256, "whole": True})


def test_other_parameters_may_have_another_align_or_none() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(Parts(SHAPES), layers=Block, policy=zero3.ShardingPolicy(gradient_reduction="sum"), process_group=group)

        def options(name: str, info: zero3.ParamInfo) -> dict[str, Any]:
            return {"align": 4} if info.ndim == 2 else {"align": BLOCK} if info.numel > 31 else {}

        groups = zero3.param_groups(model, options)
        optimizers = [InBlocks([group]) if "align" in group else torch.optim.SGD([group], lr=0.05, momentum=0.5) for group in groups]
        assert [group.get("align") for group in groups] == [4, None, BLOCK]
        go(model, zero3.OptimizerList(*optimizers), range(3), own(group.rank, 3))
        assert_equal(model, plain, "mixed")

    plain, reference = plainly()
    go(plain, reference, range(3), together)
    run_ranks(3, body)


def test_the_trainable_choice_may_change_afterwards() -> None:
    def body(group: ThreadCommunicator) -> None:
        model, optimizer = sharded(group)
        go(model, optimizer, range(1), own(group.rank, 3))
        optimizer.zero_grad()
        zero3.set_trainable(model, lambda name, info: "blocks.1" in name or info.ndim == 2)
        optimizer = InBlocks(zero3.param_groups(model, lambda name, info: ALIGNED))
        go(model, optimizer, range(1, 3), own(group.rank, 3))
        assert_equal(model, plain, "after")

    plain, reference = plainly()
    go(plain, reference, range(1), together)
    reference.zero_grad()
    for name, p in plain.named_parameters():
        p.requires_grad_("blocks.1" in name or p.ndim == 2)
    reference = InBlocks([p for p in plain.parameters() if p.requires_grad])
    go(plain, reference, range(1, 3), together)
    run_ranks(3, body)
