"""Ranks that give ZeroRedundancyOptimizer the same unnamed parameters in different orders are told, and nobody else is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import WORLDS
from tests.support.processes import Rank, on_ranks
from tests.zero1.test_ddp import OFF, in_buckets
from tests.zero1.test_zero_redundancy_optimizer import assert_same_bits, give_gradients, odd_parameters, on_threads, train, values_of
from tests.zero1.test_zero_redundancy_optimizer_use import ADAMW, ours_on

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128]


def alike(dtype: torch.dtype = torch.float32, zeros: bool = False, shape: tuple[int, ...] = (5, 4)) -> list[nn.Parameter]:
    """Of one shape. The last one lies with gaps in memory."""
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]
    values.append(torch.randn(*shape, 2, generator=generator).to(dtype)[..., 0])
    return [nn.Parameter(value.zero_() if zeros else value) for value in values]


def told_in_a_step(parameters: list[nn.Parameter], given: Any, group: Any, says: str, **options: Any) -> None:
    ours = ours_on(group, given, **ADAMW, **options)
    give_gradients(parameters, 0)
    before = values_of(parameters)
    for _ in range(2):  # as long as it is so
        with pytest.raises(ValueError, match=says):
            ours.step()
    assert_same_bits(values_of(parameters), before)


@pytest.mark.parametrize("view", [False, True], ids=["own memory", "bucket view"])
@pytest.mark.parametrize("zeros", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parameters_in_another_order_on_one_rank_are_told_at_the_first_step(dtype: torch.dtype, zeros: bool, view: bool) -> None:
    def body(group: Any) -> None:
        parameters = alike(dtype, zeros)
        order = [2, 1, 0, 3] if group.rank == 1 else range(4)
        what = "gradient" if zeros else "values"
        says = f"^rank 1: parameter 0 of group 0 has the {what} that parameter 2 of group 0 has on rank 0. Give all ranks"
        told_in_a_step(parameters, [parameters[number] for number in order], group, says, parameters_as_bucket_view=view)

    on_threads(3, body)


def test_parameters_of_other_groups_on_one_rank_are_told() -> None:
    def body(group: Any) -> None:
        parameters = alike(shape=(300, 300))
        a, b, c, d = parameters
        given = [{"params": [a, c], "lr": 0.1}, {"params": [d, b]}] if group.rank else [{"params": [a, b], "lr": 0.1}, {"params": [d, c]}]
        told_in_a_step(parameters, given, group, "parameter 1 of group 0 has the values that parameter 1 of group 1 has on rank 0")

    on_threads(2, body)


def test_a_group_that_is_added_is_compared_too() -> None:
    def body(group: Any) -> None:
        parameters, added = odd_parameters(), alike()
        ours = ours_on(group, parameters, **ADAMW)
        train(ours, parameters, range(1))
        ours.add_param_group({"params": [added[2], added[1], added[0], added[3]] if group.rank else added})
        give_gradients([*parameters, *added], 1)
        with pytest.raises(ValueError, match="parameter 0 of group 1 has the values that parameter 2 of group 1 has on rank 0"):
            ours.step()

    on_threads(2, body)


@WORLDS
def test_values_that_differ_between_ranks_and_values_that_are_alike_are_no_other_order(world_size: int) -> None:
    """Without DDP ranks may begin with different values: each element is updated from its owner's, and then is the same everywhere."""

    def made(rank: int) -> list[nn.Parameter]:
        return [nn.Parameter(torch.full((7, world_size), float(rank))), *(nn.Parameter(torch.zeros(7, world_size)) for _ in range(2))]

    expected = []
    for rank in range(world_size):
        plain = made(rank)
        expected.append(train(torch.optim.AdamW(plain, **ADAMW), plain, range(3)))

    def body(group: Any) -> list[Tensor]:
        parameters = made(group.rank if group else 0)
        return train(ours_on(group, [{"params": parameters, "whole": True}], **ADAMW), parameters, range(3))

    results = on_threads(world_size, body)
    for found in results:
        assert_same_bits(found, results[0])
        assert_same_bits(found[1:], expected[0][1:])
        assert any(torch.equal(found[0], each[0]) for each in expected)


def test_comparing_orders_takes_no_exchange_of_its_own() -> None:
    def body(group: Any) -> list[int]:
        parameters = alike()
        ours, counts = ours_on(group, parameters, **ADAMW), []
        for step in range(3):
            group.log.clear()
            train(ours, parameters, range(step, step + 1))
            counts.append(sum(entry.kind == "exchange" for entry in group.log))
        return counts

    assert on_threads(2, body) == [[1, 1, 1]] * 2


def overlapping_in_another_order(rank: Rank) -> None:
    ddp = in_buckets(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    order = [4, 1, 2, 3, 0, 5] if rank.number else range(6)
    parameters = list(ddp.parameters())
    ours = zero3.ZeroRedundancyOptimizer([parameters[number] for number in order], torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(
        ValueError, match=r"parameter 0 of group 0 is module\.0\.weight; rank 1: parameter 0 of group 0 is module\.2\.weight"
    ):
        ours.hook(ddp)


@pytest.mark.slow
def test_hook_compares_which_parameters_of_the_model_they_are() -> None:
    on_ranks(2, overlapping_in_another_order, **OFF)


def under_ddp(rank: Rank) -> None:
    torch.manual_seed(rank.number)  # DDP sends rank 0's values
    ddp = in_buckets(nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))
    a, b, c, d, *others = ddp.parameters()
    ours = zero3.ZeroRedundancyOptimizer([c, b, a, d, *others] if rank.number else ddp.parameters(), torch.optim.SGD, lr=0.1)
    ddp(torch.full((2, 4), 1.0 + rank.number)).pow(2).mean().backward()
    with pytest.raises(ValueError, match=r"^rank 1: parameter 0 of group 0 has the values that parameter 2 of group 0 has on rank 0"):
        ours.step()


@pytest.mark.slow
def test_ranks_with_other_values_before_ddp_are_told_of_another_order() -> None:
    on_ranks(2, under_ddp, **OFF)
