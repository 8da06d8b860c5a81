"""What users do to gradients between backward and step, where some parameters were reached by no gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_close
from tests.support.unreached import (
    STEPS,
    WIDTH,
    Block,
    Make,
    Plain,
    Use,
    adamw,
    batch,
    chunks_of,
    loss_of,
    net,
    seldom,
    sgd,
)

A_ALONE: Use = lambda block, step, rank, ranks: {"a"}  # noqa: E731
FULL_FIRST: Use = lambda block, step, rank, ranks: {"a"} if step else {"a", "b"}  # noqa: E731


def lives(use: Use, given: tuple[Any, Make], between: Callable[[int, Any, list[Any]], None], after: Any = None, ranks: int = 2) -> None:
    """Compares a training with that of plain torch, if between backward and step `between` gets the step, optimizer and parameters, and
    after it `after` does (by default gradients are zeroed).
    """
    plain, models = net(), [net() for _ in range(ranks)]

    def live(model: Any, modules: list[Any], parameters: Any, own: list[int], count: int) -> None:
        optimizer = given[1](parameters)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for step in range(STEPS):
            for rank in own:
                (loss_of(model, modules, use, (step, 0, rank, ranks)) / count).backward()
            between(step, optimizer, held)
            optimizer.step()
            optimizer.zero_grad() if after is None else after(step, optimizer, held)

    live(plain, list(plain.blocks), plain.parameters(), list(range(ranks)), ranks)

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        live(model, modules, given[0](model), [group.rank], 1)
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(ranks, body):
        assert_close(values, plain.state_dict(), 1e-9, "parameters")


def nothing_more(step: int, optimizer: Any, held: list[Any]) -> None:
    return None


def two_groups(model: Any) -> Any:
    return zero3.param_groups(model, lambda name, info: {"first": "b.bias" not in name})


@pytest.mark.parametrize("kept", ["zeroed in place", "cloned"])
def test_a_part_whose_gradient_stays_does_not_hide_that_another_ones_is_unreached(kept: str) -> None:
    """One group's gradients stay as zeros; the other's go. Then b is reached by nobody: its weights are zeros, its bias is None."""

    def after(step: int, optimizer: Any, held: list[Any]) -> None:
        bias = {id(p) for p in held if p.shape == (3 * WIDTH + 1,)} or {id(p) for p in optimizer.param_groups[-1]["params"]}
        for p in held:
            if id(p) in bias or p.grad is None:
                p.grad = None
            elif kept == "cloned":
                p.grad = p.grad.clone()
            else:
                p.grad.zero_()

    lives(FULL_FIRST, (two_groups, sgd), nothing_more, after)


def halved(step: int, optimizer: Any, held: list[Any]) -> None:
    for p in held:
        if p.grad is not None:
            p.grad = p.grad * 0.5


@pytest.mark.parametrize("use", [A_ALONE, seldom])
def test_a_gradient_that_is_replaced_is_still_of_what_was_reached(use: Use) -> None:
    lives(use, (chunks_of, adamw), halved)


class Failing(torch.optim.SGD):
    """Its second step raises, after it has changed values. Its base's step is one of its own."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.9)
        super().step(closure)
        self.count += 1
        if self.count == 2:
            raise KeyError("once")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.9)


def test_a_subclass_that_changes_values_around_its_base_class_is_left_alone_as_a_whole_and_may_raise() -> None:
    """In a process that has made a plain SGD before: torch calls its hooks around each of both. What was put aside for a step that
    raised is not put back by the next one.
    """
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)

    def failing(parameters: Any) -> torch.optim.Optimizer:
        return Failing(parameters, lr=0.05, momentum=0.9, weight_decay=0.3)

    def raises(step: int, optimizer: Any, held: list[Any]) -> None:
        if step == 1:
            before, state = [p.detach().clone() for p in held], copy.deepcopy(optimizer.state_dict())
            with pytest.raises(KeyError):
                optimizer.step()
            optimizer.load_state_dict(state)
            with torch.no_grad():
                for p, value in zip(held, before, strict=True):
                    p.copy_(value)

    lives(lambda block, step, rank, ranks: {"a"} if step < 2 else {"a", "b"}, (chunks_of, failing), raises)
    lives(lambda block, step, rank, ranks: {"a"}, (chunks_of, failing), raises)


class FailingFirst(torch.optim.SGD):
    """Its second step raises before it has changed anything."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.count == 2:
            raise KeyError("once")
        return super().step(closure)


@pytest.mark.parametrize("then", ["reached", "unreached"])
def test_a_step_that_raised_is_over_whoever_holds_its_traceback(then: str) -> None:
    """What was put aside for it comes back in no later step, and later ones leave alone what is unreached."""
    held = []

    def failing(parameters: Any) -> torch.optim.Optimizer:
        return FailingFirst(parameters, lr=0.05, momentum=0.9, weight_decay=0.3)

    def raises(step: int, optimizer: Any, parameters: list[Any]) -> None:
        if step == 1:
            try:
                optimizer.step()
            except KeyError as error:
                held.append(error)  # as a notebook does

    lives(lambda block, step, rank, ranks: {"a"} if step < 2 or then == "unreached" else {"a", "b"}, (chunks_of, failing), raises)
    assert held


def test_a_parameter_that_a_group_gets_later_is_left_alone_too() -> None:
    def late(parameters: Any) -> torch.optim.Optimizer:
        first, *others = list(parameters)
        optimizer = sgd([first])
        optimizer.others = others  # type: ignore[attr-defined]
        return optimizer

    def append(step: int, optimizer: Any, held: list[Any]) -> None:
        if step == 1:
            optimizer.param_groups[0]["params"] += optimizer.others

    models = [net() for _ in range(2)]

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        optimizer = late(zero3.get_trainable_chunk(model))
        for step in range(STEPS):
            loss_of(model, modules, A_ALONE, (step, 0, group.rank, 2)).backward()
            append(step, optimizer, [])
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        for name, value in net().state_dict().items():
            assert ".b." not in name or torch.equal(values[name], value), name


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_penalty_counts_in_norms_names_and_clipping_as_it_does_in_the_step(world_size: int) -> None:
    plain, models = net(), [net() for _ in range(world_size)]
    for rank in range(world_size):
        (loss_of(plain, list(plain.blocks), A_ALONE, (0, 0, rank, world_size)) / world_size).backward()
    sum(p.pow(2).sum() for p in plain.parameters()).backward()  # type: ignore[union-attr]
    norms = {name: p.grad.norm() for name, p in plain.named_parameters() if p.grad is not None}
    total = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        loss_of(model, modules, A_ALONE, (0, 0, group.rank, world_size)).backward()
        sum(p.pow(2).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        with zero3.full_gradients(model) as gradients:
            names = set(gradients)
        return zero3.parameter_norms(model), names, zero3.clip_grad_norm_(model, 0.1)

    for found, names, clipped in run_ranks(world_size, body):
        assert_close(found, norms, 1e-9, "norms")
        assert names == norms.keys()
        assert torch.allclose(clipped, total, rtol=1e-12)


def test_no_hook_is_called_by_a_backward_that_reaches_nothing_of_a_chunk() -> None:
    """Neither a tensor's hooks nor those behind the accumulation, also in a later micro-batch."""
    models = [net() for _ in range(2)]
    micros = ({"a"}, set[str](), {"a", "b"})

    def body(group: ThreadCommunicator) -> list[tuple[str, int]]:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        called: list[tuple[str, int]] = []
        chunk = zero3.get_trainable_chunk(model)[1]
        for number, used in enumerate(micros):
            before = chunk.register_hook(lambda _, number=number: called.append(("before", number)))
            after = chunk.register_post_accumulate_grad_hook(lambda _, number=number: called.append(("after", number)))
            loss_of(model, modules, lambda block, *_, used=used: used if block == 1 else {"a", "b"}, (0, number, group.rank, 2)).backward()
            before.remove()
            after.remove()
        return called

    assert run_ranks(2, body) == [[("before", 0), ("after", 0), ("before", 2), ("after", 2)]] * 2


def test_what_a_backward_had_reached_that_raised_is_forgotten() -> None:
    """The gradients of its last layers have landed already."""
    models, plain = [net() for _ in range(2)], Plain(2, A_ALONE, sgd)

    def body(group: ThreadCommunicator) -> Any:
        model, modules = models[group.rank], list(models[group.rank].blocks)
        zero3.shard(model, Block, process_group=group)
        optimizer = sgd(zero3.get_trainable_chunk(model))

        def fail(gradient: Tensor) -> None:
            raise KeyError("once")

        x = batch(0, 0, group.rank).requires_grad_()
        for block in modules:
            block.use = {"a"}
        y = x * 1
        y.register_hook(fail)
        with pytest.raises(KeyError):
            model(y).pow(2).sum().backward()
        for step in range(STEPS):
            loss_of(model, modules, A_ALONE, (step, 0, group.rank, 2)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return zero3.full_state_dict(model, rank0_only=False)

    for values in run_ranks(2, body):
        assert_close(values, plain.model.state_dict(), 1e-9, "parameters")
