"""fetch, release, set_forward_order and reduce_gradients: numbers stay those of plain torch, transfers change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support import processes
from tests.support.inside import chunks_of
from tests.support.models import WORLDS
from tests.support.ranks import Collective, ThreadCommunicator, run_ranks
from tests.support.reference import TOLERANCE, Turn, assert_at_rest, assert_close, by_shard, check_parity, process_group, sgd
from tests.support.stacks import Stack, loss_of, stack, train
from zero3 import ShardingPolicy

POLICIES = [ShardingPolicy(), ShardingPolicy(reshard_after_forward=False), ShardingPolicy(stage=2), ShardingPolicy(transactional=True)]


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, zero3.Zero3Layer) for module in model.modules())


def by_hand(model: Any, turn: Turn) -> list[Tensor]:
    """Fetched before the forward, between two forwards, and between forward and backward; released at as odd moments."""
    sharded = is_sharded(model)
    if sharded:
        zero3.fetch(model.blocks[turn.step % 3])
        zero3.fetch(model.head)
    first = train(model, turn)
    if sharded:
        zero3.release(model.head)
        zero3.fetch(model)
    second = loss_of(model, turn)
    if sharded and turn.step % 2:
        zero3.release(model)
    second.backward()
    if sharded:
        zero3.release(model)
    return [first, second]


@WORLDS
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_fetch_and_release_change_no_number(world_size: int, policy: ShardingPolicy) -> None:
    check_parity(stack, by_hand, world_size=world_size, shard=by_shard, policy=policy, steps=4)


def gathers(group: ThreadCommunicator) -> list[Collective]:
    found = [entry for entry in group.log if entry.kind == "all_gather"]
    group.log.clear()
    return found


@pytest.mark.parametrize("update", ["step", "data"])
def test_what_is_fetched_by_hand_is_gathered_again_only_after_a_change(update: str) -> None:
    models, plain = [stack() for _ in range(2)], stack()

    def step(model: nn.Module, parameters: Any) -> Tensor:
        loss = train(model, Turn(0, 0, 1))
        if update == "step":
            sgd(parameters).step()
        for parameter in parameters:
            if update == "data":  # leaves no trace in the version
                parameter.data.sub_(parameter.grad.as_subclass(Tensor), alpha=0.1)
            parameter.grad = None
        return loss.detach()

    expected = [step(plain, list(plain.parameters())) for _ in range(3)]

    def body(group: ThreadCommunicator) -> list[Tensor]:
        model: Stack = zero3.shard(models[group.rank], process_group=group)
        group.log.clear()
        zero3.fetch(model)
        layers = zero3.report(model).layers
        assert len(gathers(group)) == layers
        with torch.no_grad():
            loss_of(model, Turn(0, 0, 1))
            loss_of(model, Turn(0, 0, 1))
        assert not gathers(group), "nothing has changed"
        losses = [step(model, zero3.get_trainable_chunk(model))]
        assert not gathers(group), "neither forward nor backward"
        losses.append(step(model, zero3.get_trainable_chunk(model)))
        assert len(gathers(group)) == layers, "once, for the new values"
        assert all(chunk.full.filled for chunk in chunks_of(model))
        with pytest.raises(RuntimeError, match="is released"):
            model.blocks[0].module.up.weight.sum()
        zero3.release(model)
        losses.append(step(model, zero3.get_trainable_chunk(model)))
        assert len(gathers(group)) > layers
        assert_at_rest(model)
        return losses

    for losses in run_ranks(2, body):
        assert_close(losses, expected, TOLERANCE, "losses")


def test_release_frees_what_an_evaluation_left_and_what_awaits_a_backward() -> None:
    models, plain = [stack() for _ in range(2)], stack()
    expected = train(plain, Turn(0, 0, 1))

    def body(group: ThreadCommunicator) -> Tensor:
        model = zero3.shard(models[group.rank], process_group=group, policy=ShardingPolicy(reshard_after_forward=False))
        loss = loss_of(model, Turn(0, 0, 1))
        zero3.release(model)
        assert_at_rest(model)
        loss.backward()
        assert_at_rest(model)
        return loss.detach()

    for loss in run_ranks(2, body):
        assert_close([loss], [expected.detach()], TOLERANCE, "loss")


def fetched_first(model: nn.Module, group: ThreadCommunicator) -> list[Collective]:
    group.log.clear()
    loss_of(model, Turn(0, 0, 1))
    return [entry for entry in group.log if entry.kind in ("all_gather", "exchange")]


def test_set_forward_order_prefetches_in_the_first_forward_and_compares_nothing() -> None:
    models, told = [stack() for _ in range(2)], [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        untold: Stack = zero3.shard(models[group.rank], process_group=group)
        model: Stack = zero3.shard(told[group.rank], process_group=group)
        order = [model.embed, *model.blocks, model.head]
        zero3.set_forward_order(model, order)
        inside: list[int] = []
        for each in (untold, model):
            each.blocks[0].module.register_forward_pre_hook(
                lambda *_: inside.append(sum(entry.kind == "all_gather" for entry in group.log))
            )
        first = fetched_first(untold, group)
        second = fetched_first(model, group)
        assert inside[1] == inside[0] + 1, "the next block is under way"
        assert [entry for entry in first if entry.kind == "all_gather"] == [entry for entry in second if entry.kind == "all_gather"]
        assert [entry.kind for entry in second].count("exchange") < [entry.kind for entry in first].count("exchange")
        wrong = zero3.shard(built_again[group.rank], process_group=group)
        zero3.set_forward_order(wrong, [wrong.head, wrong.blocks[2]])
        assert torch.equal(loss_of(wrong, Turn(0, 0, 1)), loss_of(model, Turn(0, 0, 1)))

    built_again = [stack() for _ in range(2)]
    run_ranks(2, body)


def all_kept(model: Any, turn: Turn) -> list[Tensor]:
    if not is_sharded(model):
        return [train(model, turn), train(model, turn)]
    with zero3.no_sync(model):
        losses = [train(model, turn), train(model, turn)]
    zero3.reduce_gradients(model)
    zero3.reduce_gradients(model)  # nothing is left
    return losses


@WORLDS
@pytest.mark.parametrize("policy", [*POLICIES, ShardingPolicy(stage=1)], ids=str)
def test_reduce_gradients_without_another_backward(world_size: int, policy: ShardingPolicy) -> None:
    check_parity(stack, all_kept, world_size=world_size, shard=by_shard, policy=policy, steps=3)


def test_reduce_gradients_after_zero_grad_reduces_nothing() -> None:
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        with zero3.no_sync(model):
            train(model, Turn(0, 0, 1))
            with pytest.raises(RuntimeError, match="reduce_gradients inside no_sync"):
                zero3.reduce_gradients(model)
        model.zero_grad()
        group.log.clear()
        zero3.reduce_gradients(model)
        assert not [entry for entry in group.log if entry.kind == "reduce_scatter"]
        assert not zero3.named_gradients(model)

    run_ranks(2, body)


MISTAKES: dict[str, tuple[Any, str]] = {
    "another layer": (lambda m, r: zero3.fetch(m.blocks[r]), "ranks differ in fetch"),
    "fetch and release": (lambda m, r: zero3.release(m) if r else zero3.fetch(m), "ranks are not at the same point"),
    "a part of a layer": (lambda m, r: zero3.fetch(m.blocks[0].up), "inside a layer"),
    "a part of a layer, reduced": (
        lambda m, r: zero3.reduce_gradients(m.blocks[0].up),
        "reduce_gradients of a Linear inside a layer, 'blocks.0'",
    ),
    "a part of the root's own layer, reset": (lambda m, r: zero3.reset(m.norm), "reset of a LayerNorm inside a layer, the root"),
    "another order": (lambda m, r: zero3.set_forward_order(m, [m.blocks[r]]), "ranks differ in set_forward_order"),
    "nothing that has layers, on one rank": (
        lambda m, r: zero3.set_forward_order(m, 3 if r else [m.head]),
        "rank 1: .*a list of modules, found a int",
    ),
    "no layer, on one rank": (lambda m, r: zero3.set_forward_order(m, iter([m.norm if r else m.head])), "rank 1: .*LayerNorm is no layer"),
    "no layer": (lambda m, r: zero3.set_forward_order(m, [m.norm]), "LayerNorm is no layer"),
    "a part of the model": (lambda m, r: zero3.set_forward_order(m.blocks, [m.blocks[0]]), "is not what zero3.shard has sharded"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_by_hand_are_told_to_all_ranks(mistake: str) -> None:
    models = [stack() for _ in range(2)]
    act, says = MISTAKES[mistake]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        with pytest.raises((ValueError, TypeError), match=says):
            act(model, group.rank)
        assert_at_rest(model)
        train(model, Turn(0, 0, 1))

    run_ranks(2, body)


def test_fetch_and_release_are_refused_while_a_layer_computes() -> None:
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        model.blocks[1].module.register_forward_pre_hook(lambda *_: zero3.release(model.blocks[1]))
        with pytest.raises(RuntimeError, match=r"release of layer .*blocks\.1.*which computes"):
            train(model, Turn(0, 0, 1))
        with zero3.resident(model), pytest.raises(RuntimeError, match="inside full_params or resident"):
            zero3.fetch(model)

    run_ranks(2, body)


@WORLDS
@pytest.mark.parametrize("zeroed", [True, False], ids=["zeroed", "left"])
@pytest.mark.parametrize("policy", [ShardingPolicy(), ShardingPolicy(stage=2), ShardingPolicy(transactional=True)], ids=str)
def test_reduce_gradients_after_a_backward_that_raised_brings_nothing_back(policy: ShardingPolicy, zeroed: bool, world_size: int) -> None:
    models = [stack() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group), policy=policy)
        train(model, Turn(0, 0, 1))
        model.zero_grad()
        fails = model.blocks[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(model, Turn(0, 1, 1))
        fails.remove()
        if zeroed:
            model.zero_grad()
        zero3.reduce_gradients(model)
        assert all(chunk.grad is None for chunk in zero3.get_trainable_chunk(model))
        assert_at_rest(model)

    run_ranks(world_size, body)


def on_a_process(rank: processes.Rank) -> dict[str, Tensor]:
    model = zero3.shard(stack())
    zero3.set_forward_order(model, [model.embed, *model.blocks, model.head])
    optimizer = sgd(zero3.get_trainable_chunk(model))
    for step in range(3):
        optimizer.zero_grad()
        by_hand(model, Turn(rank.number, step, 2))
        with zero3.no_sync(model):
            train(model, Turn(rank.number, step, 2))
        zero3.reduce_gradients(model)
        optimizer.step()
    return zero3.full_state_dict(model, rank0_only=False)


def test_fetch_release_and_reduce_gradients_on_processes() -> None:
    plain = stack()
    optimizer = sgd(plain.parameters())
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            for _ in range(3):
                (loss_of(plain, Turn(rank, step, 2)) / 2).backward()
        optimizer.step()
    for found in processes.on_ranks(2, on_a_process):
        assert_close(found, plain.state_dict(), TOLERANCE, "after three steps")
