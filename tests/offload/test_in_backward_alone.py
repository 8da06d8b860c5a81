"""`offload_optimizer(in_backward=True)`: one living optimizer steps a chunk inside backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.models import WORLDS, linear, seeded, step
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, in_sequence, process_group

SAYS = (
    r"layer .+ is stepped inside backward by another living AdamW \(offload_optimizer with in_backward=True\)\. That one uses the "
    r"gradients up, and none would be left for this SGD\. Give each chunk to one optimizer, or first delete the other one, and schedulers "
    "and all else that refers to it$"
)


def wrapped(group: ThreadCommunicator, place: str | Path | None) -> nn.Module:
    return in_sequence(seeded(linear, linear), process_group(group), zero3.ShardingPolicy(offload=place))


def first(model: nn.Module) -> torch.optim.Optimizer:
    return zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1), in_backward=True)


def second(model: nn.Module) -> torch.optim.Optimizer:
    return zero3.offload_optimizer(torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1), in_backward=True)


def trained(group: ThreadCommunicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    for number in range(2):
        step(model, Turn(group.rank, number, group.world_size))
        optimizer.step()
        optimizer.zero_grad()
    return [chunk.detach().clone() for chunk in model.parameters()]


def same(mine: list[Any], theirs: list[Any]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("files", [True, False])
@WORLDS
def test_a_second_one_is_refused_by_name_on_all_ranks_and_the_first_goes_on(world_size: int, files: bool, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> str:
        place = tmp_path if files else "cpu"
        plain = wrapped(group, None)
        expected = trained(group, plain, torch.optim.AdamW(zero3.get_trainable_chunk(plain), lr=0.1))
        model = wrapped(group, place)
        optimizer = first(model)
        with pytest.raises(ValueError, match=SAYS) as caught:
            second(model)
        assert same(trained(group, model, optimizer), expected)
        return str(caught.value)

    assert len(set(run_ranks(world_size, body))) == 1


def test_one_rank_that_still_holds_the_first_one_tells_all(tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = wrapped(group, tmp_path)
        optimizer = first(model)
        if group.rank == 0:
            del optimizer
        with pytest.raises(ValueError, match=f"^rank 1: {SAYS}"):
            second(model)

    run_ranks(2, body)


@pytest.mark.parametrize(("cycle", "world_size"), [(False, 2), (True, 1)])
def test_one_that_is_deleted_does_not_count_and_steps_no_more(cycle: bool, world_size: int, tmp_path: Path) -> None:
    """A cycle on one rank only: while one thread collects cycles, Python lets no other do so, and here ranks are threads."""

    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model = wrapped(group, place)
            if place is not None:
                holder: list[Any] = [first(model)]
                with pytest.raises(ValueError, match=SAYS) as error:  # its traceback, which a notebook keeps, holds no optimizer
                    second(model)
                holder += [holder] if cycle else []
                del holder
            found.append(trained(group, model, second(model)))
        assert same(*found) and error is not None

    run_ranks(world_size, body)


def test_each_may_step_chunks_of_its_own(tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> None:
        found = []
        for place in (None, tmp_path):
            model = wrapped(group, place)
            chunks = zero3.get_trainable_chunk(model)
            optimizers = [torch.optim.SGD([chunk], lr=0.1) for chunk in chunks]
            optimizers = [zero3.offload_optimizer(each, in_backward=True) for each in optimizers]
            for number in range(2):
                step(model, Turn(group.rank, number, 2))
                for each in optimizers:
                    each.step()
                    each.zero_grad()
            found.append([chunk.detach().clone() for chunk in chunks])
        assert same(*found)

    run_ranks(2, body)
