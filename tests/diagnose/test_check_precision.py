"""check() under mixed precision: the unsharded copy is cast alike, so what is right is not called wrong, and what is wrong still is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import changed_gradients
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, in_sequence, process_group
from tests.support.stacks import Block, Stack, loss_of
from zero3 import ShardingPolicy

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEEDS = range(6)

POLICIES = {
    "compute in bf16, reduce in fp32": ShardingPolicy(param_dtype=BF16, reduce_dtype=FP32),
    "all in bf16": ShardingPolicy(param_dtype=BF16),
    "reduce in bf16": ShardingPolicy(reduce_dtype=BF16),
    "the output in fp32": ShardingPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32),
    "inputs as they are": ShardingPolicy(param_dtype=FP16, cast_forward_inputs=False),
    "stage 1": ShardingPolicy(param_dtype=BF16, reduce_dtype=FP32, stage=1),
}


class Normed(Block):
    """With what stays in fp32 between casts: a buffer."""

    def __init__(self, hidden: int = 7) -> None:
        super().__init__(hidden)
        self.norm = nn.LayerNorm(5)
        self.register_buffer("scale", torch.tensor(1.25))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x)) * self.scale


def normed(seed: int) -> Stack:
    torch.manual_seed(seed)
    return Stack(Normed(7), Normed(8), Normed(9))


def loss(model: nn.Module, turn: Turn) -> Tensor:
    return loss_of(model, turn).float()


def checked(world_size: int, policy: ShardingPolicy, seed: int, **options: Any) -> list[Any]:
    models = [normed(seed) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> Any:
        batch = Turn(group.rank, seed, world_size)
        return zero3.check(models[group.rank], batch, loss, policy=policy, process_group=process_group(group), **options)

    return run_ranks(world_size, body)


@WORLDS
@pytest.mark.parametrize("name", POLICIES)
def test_check_calls_nothing_wrong_that_is_cast_alike(name: str, world_size: int) -> None:
    for seed in SEEDS:
        for report in checked(world_size, POLICIES[name], seed):
            assert report.first is None, str(report)
            if world_size == 1:
                assert report.worst == 0, "the same bits"


@pytest.mark.parametrize("name", POLICIES)
def test_check_still_finds_a_wrong_gradient(name: str) -> None:
    with changed_gradients(lambda name, gradient: gradient * 1.1 if name == "up.weight" else gradient):
        reports = checked(2, POLICIES[name], 0)
    for report in reports:
        assert {difference.name for difference in report.differences} == {f"blocks.{i}.up.weight" for i in range(3)}


def test_check_takes_the_policies_of_what_wrap_makes() -> None:
    """Layers of different policies, in a Zero3Sequential."""
    policies = [ShardingPolicy(param_dtype=BF16), ShardingPolicy(param_dtype=FP32), ShardingPolicy(param_dtype=FP16, reduce_dtype=FP32)]

    def wrap(model: nn.Module) -> nn.Module:
        layers = [zero3.Zero3Layer(child, policy=policy) for child, policy in zip(model.children(), policies, strict=True)]
        return zero3.Zero3Sequential(layers)

    for seed in SEEDS:
        torch.manual_seed(seed)
        report = zero3.check(nn.Sequential(*[Block(7 + i) for i in range(3)]), Turn(0, seed, 1).tensor(3, 5).float(), wrap=wrap)
        assert report.first is None and report.worst == 0, str(report)


def test_check_without_casts_compares_as_closely_as_before() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(7 + i) for i in range(3)]).double()
    for report in run_ranks(
        2, lambda group: zero3.check(model, Turn(group.rank, 0, 2).tensor(3, 5), wrap=lambda m: in_sequence(m, group, ShardingPolicy()))
    ):
        assert report.first is None and report.worst < 1e-12
