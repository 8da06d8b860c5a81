"""A backward that raises on all ranks, with transactional=True: what earlier ones brought stays."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import zero3
from tests.resilience.test_step_guard import LAYERS_OF_MODEL, check, expected, loss_of, reentrants, sharded
from tests.support.footprint import LAYERS, WIDTHS, Formula, make
from tests.support.live import LiveBytes
from tests.support.models import WORLDS, Broken, fused
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_at_rest
from zero3 import ShardingPolicy


@WORLDS
@reentrants
@pytest.mark.parametrize("where", range(LAYERS_OF_MODEL))
def test_transactional_takes_back_only_what_a_broken_backward_brought(world_size: int, reentrant: bool | None, where: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, transactional=True)
        for number in (0, 1):
            loss_of(model, group.rank, number, reentrant).backward()
        for _ in range(2):
            model[where].module.blows = None
            loss = loss_of(model, group.rank, 2, reentrant)
            model[where].module.blows = ("backward", Broken)
            with pytest.raises(Broken):
                loss.backward()
            del loss
        model[where].module.blows = None
        zero3.reset(model)
        check(model, group, after_two)
        loss_of(model, group.rank, 3, reentrant).backward()
        check(model, group, after_all)
        assert_at_rest(model)

    after_two, after_all = expected(world_size, [0, 1]), expected(world_size, [0, 1, 3])
    run_ranks(world_size, body)


@WORLDS
@pytest.mark.parametrize("policy", [{"stage": 2}, {"dynamic": True}, {"reduce_dtype": torch.float64, "gradient_reduction": "sum"}])
def test_transactional_with_other_policies(world_size: int, policy: dict[str, Any]) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, transactional=True, **policy)
        loss_of(model, group.rank, 0).backward()
        model[0].module.blows = ("backward", Broken)
        with pytest.raises(Broken):
            loss_of(model, group.rank, 1).backward()
        model[0].module.blows = None
        loss_of(model, group.rank, 2).backward()
        check(model, group, wanted)

    wanted = expected(world_size, [0, 2])
    if policy.get("gradient_reduction") == "sum":
        wanted = {name: value * world_size for name, value in wanted.items()}
    run_ranks(world_size, body)


def test_transactional_needs_gradients_that_are_reduced_in_backward() -> None:
    with pytest.raises(ValueError, match="transactional=True needs stage 2 or 3"):
        ShardingPolicy(stage=1, transactional=True)


@WORLDS
@pytest.mark.parametrize("broken_waits", [False, True])
@pytest.mark.parametrize("earlier_waits", [False, True])
def test_what_no_sync_has_kept_stays(world_size: int, earlier_waits: bool, broken_waits: bool) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, transactional=True)
        for number in (0, 1):
            with zero3.no_sync(model) if earlier_waits else nullcontext():
                loss_of(model, group.rank, number).backward()
        model[0].module.blows = ("backward", Broken)  # layers 2 and 1 are over by then
        with pytest.raises(Broken), zero3.no_sync(model) if broken_waits else nullcontext():
            loss_of(model, group.rank, 2).backward()
        model[0].module.blows = None
        with zero3.no_sync(model) if broken_waits else nullcontext():
            loss_of(model, group.rank, 3).backward()
        loss_of(model, group.rank, 4).backward()
        check(model, group, wanted)

    wanted = expected(world_size, [0, 1, 3, 4])
    run_ranks(world_size, body)


@WORLDS
@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("where", [None, 0, 2])
def test_a_token_mean_that_breaks_leaves_the_earlier_mean_or_nothing(world_size: int, transactional: bool, where: int | None) -> None:
    """`where`: None: the loss's own backward, before any layer's."""

    def tokens(rank: int, number: int) -> int:
        return 1 + rank + 2 * number

    def body(group: ThreadCommunicator) -> None:
        model = sharded(group, transactional=transactional)
        zero3.backward(loss_of(model, group.rank, 0), tokens(group.rank, 0), model)
        loss = loss_of(model, group.rank, 1)
        if where is None:
            loss.register_hook(lambda gradient: (_ for _ in ()).throw(Broken()))
        else:
            model[where].module.blows = ("backward", Broken)
        with pytest.raises(Broken):
            zero3.backward(loss, tokens(group.rank, 1), model)
        for layer in model:
            layer.module.blows = None
        if not transactional:
            assert all(chunk.grad is None for chunk in model.get_trainable_chunk())
        zero3.backward(loss_of(model, group.rank, 2), tokens(group.rank, 2), model)
        check(model, group, wanted)

    plain, numbers = fused(), [0, 2] if transactional else [2]
    total = sum(tokens(rank, number) for rank in range(world_size) for number in numbers)
    for rank in range(world_size):
        for number in numbers:
            (loss_of(plain, rank, number) / total).backward()
    wanted = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    run_ranks(world_size, body)


@WORLDS
def test_transactional_costs_one_more_gradient_shard(world_size: int) -> None:
    """From the second micro-batch on; in the first one what is staged becomes the gradient."""
    formula = Formula(world_size, depth=1)
    peaks = {}
    for transactional in (False, True):
        with LiveBytes() as live:
            model = make(world_size, transactional=transactional)
            first, second = (live.peak_of(lambda: model(torch.empty(0, WIDTHS[0])).sum().backward()) for _ in range(2))  # noqa: B023
            peaks[transactional] = first, second
            assert live.now - formula.chunks == sum(formula.G), "after the backward there is one gradient again"
    assert peaks[True][0] == peaks[False][0]
    # without a transaction, what has landed is one sum with what was there: only what travels is held twice
    landed = max(sum(formula.G[j] for j in LAYERS if j > i + 1) for i in LAYERS)
    assert 0 < peaks[True][1] - peaks[False][1] <= landed <= sum(formula.G)
