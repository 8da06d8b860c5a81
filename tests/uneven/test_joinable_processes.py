"""Ranks as processes in torch's own Join: with different numbers of batches they train as one process on those that there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.support.inside import is_straight
from tests.support.processes import PROMPT, Rank, on_ranks, try_on_ranks
from tests.support.reference import assert_at_rest
from tests.support.uneven import Failure, Plan, Story, adamw, assert_same, plain, sharded, tell_sharded, words


@contextmanager
def joined(model: nn.Module, step: Callable[[], None], **options: Any) -> Iterator[Any]:
    uneven = zero3.joinable(model, step)
    with Join([uneven], **options):
        yield uneven
    assert_at_rest(model)
    assert is_straight(model)


def train(rank: Rank, plans: list[Plan]) -> list[Story]:
    stories = []
    for plan in plans:
        group = plan.mesh and init_device_mesh("cpu", plan.mesh, mesh_dim_names=("dp_replicate", "dp_shard"))
        enter = partial(joined, divide_by_initial_world_size=plan.by_all)
        stories.append(tell_sharded(plan, plain(plan), rank.number, enter, group))
    return stories


@pytest.mark.slow
def test_training_equals_plain_torch() -> None:
    plans = [Plan(), Plan(by_all=True, clip=0.5), Plan(kind="llama"), Plan(kind="llama", by_all=True, clip=0.5)]
    plans += [Plan(((2, 2), (2, 1), (2,)), kind="tied llama"), Plan(kind="container", zero_first=True, evaluate=True)]
    stories = on_ranks(3, train, plans)
    for plan, *of_ranks in zip(plans, *stories, strict=True):
        assert_same(list(of_ranks), plan, 1e-6 if "llama" in plan.kind else 1e-9)


@pytest.mark.slow
def test_training_on_meshes_with_failures_in_step_guards_equals_plain_torch() -> None:
    plan = Plan(((), (1,), (1, 1, 1, 1), (1, 1, 1)))
    failing = replace(plan, guarded=True, fails=(Failure(3, 1, 0, "forward"), Failure(2, 2, 0, "backward"), Failure(2, 3, 0, "before")))
    transactional = replace(failing, policy=zero3.ShardingPolicy(transactional=True))
    plans = [replace(failing, mesh=(2, 2)), replace(failing, mesh=(4, 1)), transactional]
    for plan, *of_ranks in zip(plans, *on_ranks(4, train, plans), strict=True):
        assert_same(list(of_ranks), plan, 1e-9)


def refuse_early(rank: Rank) -> tuple[str, bool, float]:
    """Raised by every rank when the first is out of data; then all train on, without Join and with a new one."""
    model, loss = sharded(Plan(), plain(Plan()))
    optimizer = adamw(zero3.get_trainable_chunk(model))
    uneven, text = zero3.joinable(model, optimizer.step), ""
    try:
        with Join([uneven], throw_on_early_termination=True):
            for step in range(rank.number + 1):
                loss(model, words(rank.number, step, 0)).backward()
                uneven.step()
    except RuntimeError as error:
        text = str(error)
    loss(model, words(rank.number, 7, 0)).backward()
    optimizer.step()
    with Join([uneven]):
        for step in range(rank.number):
            loss(model, words(rank.number, step, 0)).backward()
            uneven.step()
    loss(model, words(rank.number, 8, 0)).backward()
    assert_at_rest(model)
    total = sum(parameter.detach().sum().item() for parameter in zero3.full_state_dict(model, rank0_only=False).values())
    return text, is_straight(model), total


def test_early_termination_raises_on_all_ranks_and_they_train_on() -> None:
    outcomes = on_ranks(3, refuse_early)
    assert outcomes[0][0] == "Rank 0 exhausted all inputs."
    assert all("Detected at least one rank that exhausted inputs" in text for text, _, _ in outcomes[1:])
    assert all(open_again for _, open_again, _ in outcomes)
    assert len({total for _, _, total in outcomes}) == 1


def disabled(rank: Rank) -> bool:
    model, loss = sharded(Plan(), plain(Plan()))
    optimizer = adamw(zero3.get_trainable_chunk(model))
    uneven = zero3.joinable(model, optimizer.step)
    with Join([uneven], enable=False):
        for step in range(4):
            with zero3.step_guard(model) as guarded:
                value = loss(model, words(rank.number, step, 0))
                if step == 3 and rank.number:
                    raise ArithmeticError
                value.backward()
            uneven.step()
    return guarded.failed and is_straight(model)


def test_a_disabled_context_does_nothing() -> None:
    assert on_ranks(2, disabled) == [True, True]


def raise_in_the_tail(rank: Rank, where: str) -> None:
    """Rank 1 raises while rank 0 has no data."""
    model, loss = sharded(Plan(), plain(Plan()))
    optimizer = adamw(zero3.get_trainable_chunk(model))

    def update() -> None:
        if where == "step" and rank.number == 1:
            raise ZeroDivisionError("of rank 1")
        optimizer.step()

    uneven = zero3.joinable(model, update)
    with Join([uneven]):
        for step in range(3 * min(rank.number, 1)):
            value = loss(model, words(rank.number, step, 0))
            if where == "backward" and rank.number == 1:
                value.register_hook(lambda _: 1 / 0)
            value.backward()
            uneven.step()


@pytest.mark.parametrize("where", ["step", "backward"])
def test_an_exception_of_one_rank_reaches_all(where: str) -> None:
    outcomes = try_on_ranks(3, raise_in_the_tail, where, fresh=True)
    assert [outcome.error for outcome in outcomes] == ["RuntimeError", "ZeroDivisionError", "RuntimeError"]
    assert all(outcome.seconds < PROMPT for outcome in outcomes)


def raise_between_batches(rank: Rank) -> None:
    """Rank 1 raises while all have data, and its process lives on."""
    model, loss = sharded(Plan(), plain(Plan()))
    told = rank.scratch / "told"
    uneven = zero3.joinable(model, adamw(zero3.get_trainable_chunk(model)).step)
    try:
        with Join([uneven]):
            for step in range(3):
                if step and rank.number:
                    raise ZeroDivisionError("of rank 1")
                loss(model, words(rank.number, step, 0)).backward()
                uneven.step()
    finally:
        told.touch() if rank.number == 0 else None
        while not told.exists():
            time.sleep(0.05)


@pytest.mark.slow
def test_ranks_that_wait_for_one_that_has_raised_say_for_what() -> None:
    waiting, raised = try_on_ranks(2, raise_between_batches, fresh=True, group_timeout=3.0, debug="OFF")
    assert raised.error == "ZeroDivisionError" and waiting.error == "RuntimeError"
    assert waiting.text.startswith("rank 0 of 2: telling other ranks of data in Join failed: ")


def two_joinables(rank: Rank) -> str:
    models = [sharded(Plan(), plain(Plan()))[0] for _ in range(2)]
    first, second = (zero3.joinable(model, lambda: None) for model in models)
    with pytest.raises(RuntimeError) as caught, Join([first, second]):
        models[1](words(0, 0, 0))
    return str(caught.value)


def what_can_not_join(rank: Rank) -> list[str]:
    told = []
    whole = zero3.Zero3Layer(nn.Linear(2, 2), policy=zero3.ShardingPolicy(stage=1))
    dynamic = zero3.Zero3Layer(nn.Linear(2, 2), policy=zero3.ShardingPolicy(dynamic=True))
    twin, alone = dist.new_group([0, 1]), [dist.new_group([number]) for number in range(2)][rank.number]
    apart = [nn.Sequential(zero3.Zero3Layer(nn.Linear(2, 2)), zero3.Zero3Layer(nn.Linear(2, 2), process_group=g)) for g in (twin, alone)]
    for model in (whole, dynamic, *apart):
        with pytest.raises(ValueError, match=r"expected|groups") as caught:
            zero3.joinable(model, lambda: None)
        told.append(str(caught.value))
    return told


def parts_that_can_not_join(rank: Rank) -> list[str]:
    stages = lambda name, module: zero3.ShardingPolicy(stage=1 if name == "0" else 3)  # noqa: E731
    halves = zero3.shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear, policy=stages)
    models = nn.ModuleList(zero3.Zero3Layer(nn.Linear(2, 2), policy=zero3.ShardingPolicy(dynamic=late)) for late in (False, True))
    layer, told = zero3.Zero3Layer(nn.Sequential(nn.Linear(2, 2))), []
    for part in (halves[1], models, layer.module[0]):
        with pytest.raises(ValueError, match="joinable") as caught:
            zero3.joinable(part, lambda: None)
        told.append(str(caught.value))
    return told


def test_a_part_joins_with_its_whole_model_or_not_at_all() -> None:
    """They were accepted, and ranks waited for each other, or the context began with an IndexError."""
    for stage, dynamic, inner in on_ranks(2, parts_that_can_not_join):
        assert "layer '0' (Linear) has policy.stage=1, expected 2 or 3" in stage
        assert "policy.dynamic=True, expected False" in dynamic
        assert "joinable of a Linear inside a layer" in inner


def test_mistakes() -> None:
    for text in on_ranks(2, two_joinables):
        assert "must be the only joinable" in text
    for whole, dynamic, *apart in on_ranks(2, what_can_not_join):
        assert "policy.stage=1, expected 2 or 3" in whole
        assert "policy.dynamic=True, expected False" in dynamic
        assert len(apart) == 2 and all("different process groups" in text for text in apart)
    model = zero3.Zero3Sequential([zero3.Zero3Layer(nn.Linear(2, 2))])
    with pytest.raises(RuntimeError, match="needs a process group"):
        zero3.joinable(model, lambda: None)
    with pytest.raises(TypeError, match="step must be a function"):
        zero3.joinable(model, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"):
        zero3.joinable(nn.Linear(2, 2), lambda: None)
