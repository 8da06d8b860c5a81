"""Where a communicator averages, as NCCL does, the reduction (`gradient_reduction`) is the mean: the same bits, and no division behind."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.inside import states_of
from tests.support.models import mlp
from tests.support.ranks import ThreadCommunicator, run_mesh, run_ranks
from tests.support.unreached import adamw, chunks_of, compare, seldom
from zero3 import Int8, ShardingPolicy


class Averaging(ThreadCommunicator):
    """Each rank multiplies by 1/W before anything is added up, which is NCCL's order."""

    @property
    def averages(self) -> bool:
        return self.world_size in (1, 2, 4)

    def reduce_to_mean(self, shard: Tensor, full: Tensor) -> Any:
        assert self.averages
        self.log.append(self.log[-1]._replace(kind="mean"))
        return self.reduce_scatter(shard, full.mul_(1 / self.world_size))

    def average_later(self, tensor: Tensor) -> Any:
        assert self.averages
        self.log.append(self.log[-1]._replace(kind="mean"))
        return self.all_reduce_later(tensor.mul_(1 / self.world_size))


def trained(group: Any, policy: ShardingPolicy, *, fewer: int, in_replica: bool) -> tuple[list[Tensor], int]:
    """Gradients of two steps of two micro-batches, and how many means were asked for."""
    model = zero3.shard(mlp().float(), nn.Linear, policy=policy, process_group=group)
    seen: list[Tensor] = []
    for state in states_of(model):
        state.gradients.average_over(fewer or group.world_size)
    for step in range(2):
        for micro in range(2):
            with nullcontext() if micro else zero3.no_sync(model, replicas_only=in_replica):
                draw = torch.Generator().manual_seed(100 * step + 10 * micro + group.rank)
                model(torch.randn(3, 5, generator=draw)).float().pow(2).sum().backward()
        seen += [chunk.grad.clone() for chunk in zero3.get_trainable_chunk(model) if chunk.grad is not None]
    return seen, sum(each.kind == "mean" for each in group.log)


CASES = {
    "fp32": {},
    "bf16, sums too": {"param_dtype": torch.bfloat16},
    "bf16, sums in fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "stage 1": {"stage": 1},
    "transactional": {"transactional": True},
}


def both(replicas: int, shards: int, fields: dict[str, Any], *, fewer: int = 0, in_replica: bool = False) -> tuple[Any, Any]:
    def body(group: Any) -> Any:
        return trained(group, ShardingPolicy(**fields), fewer=fewer, in_replica=in_replica)

    def run(kind: Any) -> Any:
        return run_mesh(replicas, shards, body, kind=kind) if replicas > 1 else run_ranks(shards, body, kind=kind)

    return run(Averaging), run(ThreadCommunicator)


def assert_same_bits(found: Any, expected: Any) -> None:
    for (mine, _), (theirs, _) in zip(found, expected, strict=True):
        assert len(mine) == len(theirs) > 0
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("world", [(1, 2), (1, 4), (2, 2), (2, 1), (4, 1)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_mean_has_the_bits_of_a_sum_that_is_divided(case: str, world: tuple[int, int]) -> None:
    found, expected = both(*world, CASES[case], in_replica=world[0] > 1)
    assert_same_bits(found, expected)
    assert all(means > 0 for _, means in found)


@pytest.mark.parametrize("fewer", [1, 3])
@pytest.mark.parametrize("world", [(1, 4), (2, 2)], ids=str)
def test_a_mean_over_the_ranks_that_have_data_has_them_too(world: tuple[int, int], fewer: int) -> None:
    """As `Join` asks for."""
    assert_same_bits(*both(*world, {}, fewer=fewer))


@pytest.mark.parametrize(
    ("world", "fields"),
    [
        ((1, 3), {}),
        ((3, 2), {}),
        ((1, 2), {"gradient_reduction": "sum"}),
        ((1, 2), {"param_dtype": torch.float16}),
        ((1, 2), {"reduce_format": Int8(block_size=8)}),
    ],
    ids=str,
)
def test_what_could_move_a_bit_is_divided_as_before(world: tuple[int, int], fields: dict[str, Any]) -> None:
    """1/3 is no power of two, and fp16 underflows."""
    found, expected = both(*world, fields)
    assert_same_bits(found, expected)
    assert not any(means for _, means in found)


@pytest.mark.parametrize("world", [(0, 2), (2, 2)], ids=str)
def test_unreached_parameters_are_told_by_means_too(world: tuple[int, int]) -> None:
    """The trailers are divided as the values are."""
    compare(world, ShardingPolicy(), seldom, (chunks_of, adamw), kind=Averaging)


@pytest.mark.parametrize("kind", [Averaging, ThreadCommunicator])
def test_behind_a_mean_nothing_is_divided(kind: Any) -> None:
    """`Tensor.div_` is what a layer's gradient is divided by."""
    divided: list[Tensor] = []
    real = Tensor.div_

    def noted(self: Tensor, *args: Any) -> Tensor:
        divided.append(self)
        return real(self, *args)

    def body(group: Any) -> None:
        model = zero3.shard(mlp().float(), nn.Linear, process_group=group)
        model(torch.ones(3, 5)).sum().backward()

    with patch.object(Tensor, "div_", noted):
        run_ranks(2, body, kind=kind)
    assert len(divided) == (0 if kind is Averaging else 2 * 3)
