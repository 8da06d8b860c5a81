"""Ranks that come apart while training, and ranks that die: a named error within the timeout, and never wrong numbers."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.processes import PROMPT, Outcome, Rank, on_ranks, try_on_ranks
from tests.support.routed import Routed, gather_others
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential

pytestmark = pytest.mark.slow

# -- the first time that ranks rely on an order


def first_call_in_other_orders(rank: Rank, inside_a_module: bool) -> None:
    order = (0, 1, 2) if rank.number == 0 else (0, 2, 1)
    if inside_a_module:
        Zero3Layer(Routed())(torch.ones(2, 4), order)
    else:
        Routed()(torch.ones(2, 4), order)


@pytest.mark.parametrize("debug", ["DETAIL", "OFF"])
@pytest.mark.parametrize("inside_a_module", [True, False], ids=["inside a layer", "one after another"])
def test_layers_called_in_other_orders_are_the_same_error_on_every_rank(inside_a_module: bool, debug: str) -> None:
    first, second = try_on_ranks(2, first_call_in_other_orders, inside_a_module, debug=debug)
    assert first.error == "ValueError"
    assert (first.error, first.text) == (second.error, second.text)
    assert "called as number 2 of a forward" in first.text or "called as number 3" in first.text
    for words in ("rank 0: ", "rank 1: ", "same order"):
        assert words in first.text
    assert max(first.seconds, second.seconds) < PROMPT


def trainable_layers_apart(rank: Rank) -> None:
    """Forwards agree, but rank 1 computes a layer without gradients."""
    model = Routed()
    x = model(torch.ones(2, 4), (0, 1))
    with torch.set_grad_enabled(rank.number == 0):
        model(x, (2,)).sum()
    x.sum().backward()


def test_backwards_over_other_layers_are_the_same_error_on_every_rank() -> None:
    first, second = try_on_ranks(2, trainable_layers_apart)
    assert (first.error, first.text) == (second.error, second.text)
    assert first.error == "ValueError"
    assert "take part in backward" in first.text


def read_other_things(rank: Rank, what: str) -> None:
    model = Zero3Layer(Routed())
    if rank.number == 0:
        with zero3.full_params(model.layers[0]):
            pass
    elif what == "another layer":
        with zero3.full_params(model.layers[1]):
            pass
    elif what == "to write":
        with zero3.full_params(model.layers[0], writeback=True):
            pass
    else:
        zero3.full_state_dict(model)


@pytest.mark.parametrize("what", ["another layer", "to write", "a state dict"])
def test_full_params_of_other_parts_are_the_same_error_on_every_rank(what: str) -> None:
    first, second = try_on_ranks(2, read_other_things, what)
    assert (first.error, first.text) == (second.error, second.text)
    assert first.error == "ValueError"
    assert "full_params" in first.text
    assert max(first.seconds, second.seconds) < PROMPT


# -- later, where ranks no longer compare what they did before


def come_apart(rank: Rank, how: str) -> str:
    model = Zero3Layer(Routed())
    optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
    x = torch.ones(2, 4)

    def step(order: tuple[int, ...] = (0, 1, 2)) -> None:
        model(x, order).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for order in ((0, 1, 2), (1, 0, 2), (0, 1), (0, 1, 2)):  # all of them are known from now on
        step(order)
    before = [chunk.clone() for chunk in model.get_trainable_chunk()]
    wrong = rank.number == 1
    try:
        if how == "an order nobody knows":
            step((2, 1, 0) if wrong else (0, 1, 2))
        elif how == "another known order":
            step((1, 0, 2) if wrong else (0, 1, 2))
        elif how == "a layer less":
            step((0, 1) if wrong else (0, 1, 2))
        elif how == "one forward more":
            for _ in range(1 + wrong):
                loss = model(x, (0, 1, 2)).sum()
            loss.backward()
        elif how == "one backward less":
            loss = model(x, (0, 1, 2)).sum()
            if not wrong:
                loss.backward()
        elif how == "a state dict on one rank":
            if wrong:
                zero3.full_state_dict(model)
        elif how == "full_params on one rank" and wrong:
            with zero3.full_params(model):
                pass
        step()
        return "went on"
    finally:
        after = model.get_trainable_chunk()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), "trained on something wrong"


APART = [
    "an order nobody knows",
    "another known order",
    "a layer less",
    "one forward more",
    "one backward less",
    "a state dict on one rank",
    "full_params on one rank",
]


@pytest.fixture(scope="module")
def apart() -> dict[str, list[Outcome]]:
    """Some at a time: what they do most is wait for the group's timeout.

    No debug mode: nothing but zero3 watches. Layers of one size meet, and a mix-up would go unnoticed.
    """
    bodies = {how: (come_apart, how) for how in APART} | {"would fit": (gather_what_would_fit,)}
    with ThreadPoolExecutor(4) as pool:
        running = {how: pool.submit(try_on_ranks, 2, *body, debug="OFF", group_timeout=4.0, fresh=True) for how, body in bodies.items()}
    return {how: each.result() for how, each in running.items()}


@pytest.mark.slow
@pytest.mark.parametrize("how", APART)
def test_ranks_that_come_apart_later_are_told_and_train_on_nothing_wrong(how: str, apart: dict[str, list[Outcome]]) -> None:
    for number, outcome in enumerate(apart[how]):
        assert outcome.error == "RuntimeError", outcome
        assert outcome.text.startswith(f"rank {number} of 2: ")
        assert any(words in outcome.text for words in ("gathering layer", "reducing the gradients of layer", "comparing"))
        assert "took another path" in outcome.text
        assert ("Every rank has to call full_" in outcome.text) == ("on one rank" in how)
        assert outcome.seconds < PROMPT


def gather_what_would_fit(rank: Rank) -> str:
    """Both ranks gather five times. The fourth and the fifth time they mean other layers, of the same size."""
    policy = ShardingPolicy(prefetch_depth=0)
    model = Zero3Layer(Routed(policy), policy=policy)
    gather_others(model, rank.number)
    return "took another layer's weights for its own"


def test_a_gather_never_brings_another_layers_weights(apart: dict[str, list[Outcome]]) -> None:
    for outcome in apart["would fit"]:
        assert outcome.error == "RuntimeError", outcome
        assert "gathering layer" in outcome.text


# -- deaths


class Deadly(nn.Module):
    """A layer in which the process dies, once it is armed."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.where, self.armed = nn.Linear(64, 64), where, False

    def forward(self, x: Tensor) -> Tensor:
        if self.armed and self.where == "forward":
            self.die()
        x = self.inner(x)
        if self.armed and self.where == "backward":
            x.register_hook(self.die)
        return x

    def die(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def train_until_death(rank: Rank, where: str, prefetch_depth: int) -> None:
    policy = ShardingPolicy(prefetch_depth=prefetch_depth)
    deadly = Deadly(where)
    modules = [nn.Linear(64, 64), deadly, nn.Linear(64, 64), nn.Linear(64, 64)]
    model = Zero3Sequential([Zero3Layer(module, policy=policy) for module in modules])
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.01)
    for step in range(10):
        deadly.armed = rank.number == 1 and step == 2
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_survivor(outcome: Outcome, number: int, world_size: int, where: str) -> None:
    assert outcome.error == "RuntimeError", outcome
    doing = r"gathering layer" if where == "forward" else r"(gathering|reducing the gradients of) layer"
    with pytest.raises(RuntimeError, match=rf"^rank {number} of {world_size}: {doing} '\d' \((Linear|Deadly)\) failed: "):
        raise RuntimeError(outcome.text)
    assert "another rank died" in outcome.text
    assert outcome.seconds < PROMPT, "it waited for the group's timeout"


@pytest.mark.parametrize("debug", ["DETAIL", "OFF"])
@pytest.mark.parametrize("prefetch_depth", [0, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_survivors_of_a_killed_rank_name_the_layer_and_what_they_did(where: str, prefetch_depth: int, debug: str) -> None:
    survivor, killed = try_on_ranks(2, train_until_death, where, prefetch_depth, debug=debug, fresh=True)
    assert (killed.error, killed.text) == ("killed", "exit code -9")
    assert_survivor(survivor, 0, 2, where)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_all_survivors_of_a_killed_rank_are_told(where: str) -> None:
    first, killed, third = try_on_ranks(3, train_until_death, where, 1, debug="OFF", fresh=True)
    assert killed.error == "killed"
    assert_survivor(first, 0, 3, where)
    assert_survivor(third, 2, 3, where)


# -- exceptions of one rank's own


def raise_once(rank: Rank, where: str) -> list[float]:
    """Rank 1 raises in one step, which both drop; then they train on."""
    torch.manual_seed(0)
    model = Zero3Sequential([Zero3Layer(nn.Linear(4, 4)) for _ in range(3)])
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1)
    losses = []
    for step in range(6):
        x = torch.full((2, 4), float(step + rank.number))
        if where and step == 3:
            with pytest.raises(ZeroDivisionError):
                fail_in(where, model, x)
            zero3.reset(model)
            optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fail_in(where: str, model: Zero3Sequential, x: Tensor) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    if where == "forward":
        handle = model[1].module.register_forward_hook(fail)
        try:
            model(x)
        finally:
            handle.remove()
    else:
        hooked = model[1].module.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        try:
            model(x).sum().backward()
        finally:
            hooked.remove()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_on_every_rank_training_goes_on_as_if_the_step_had_not_been(where: str) -> None:
    assert on_ranks(2, raise_once, where) == on_ranks(2, raise_once, "")
