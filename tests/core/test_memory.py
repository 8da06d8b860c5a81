"""Bytes of live tensors at each point of a step: equal to docs/memory.md (`tests/support/footprint.py`), to the byte."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.support.footprint import BYTES, GIVEN, LAYERS, WIDTHS, Block, Formula, GlooFormula, Point, make, wrap
from tests.support.inside import presences
from tests.support.live import LiveBytes
from tests.support.models import WORLDS
from tests.support.processes import Rank, on_ranks
from zero3 import Zero3Layer, clip_grad_norm_, full_state_dict, load_full_state_dict, reset

ranks = pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (2, 0), (2, 1), (3, 0), (3, 2)])
depths = pytest.mark.parametrize("depth", [0, 1, 2])


def check_steps(formula: Formula, world_size: int | None, slack: int = 0) -> None:
    points: dict[str, int] = {}

    def check(when: str, expected: int) -> None:
        now = points.pop(when) if when in points else live.settled(expected + slack)
        excess = now - expected
        assert 0 <= excess <= slack, f"{when}: {excess:+} bytes"

    with LiveBytes() as live:
        policy = {"prefetch_depth": formula.depth, "reshard_after_forward": not formula.kept}
        model = make(world_size, lambda name: points.update({name: live.now}), **policy)
        optimizer = torch.optim.AdamW(model.get_trainable_chunk())
        held, landed = formula.chunks, sum(formula.G)
        check("after construction", held)
        for _ in range(2):
            for gradients in (0, landed):
                output = model(torch.empty(0, WIDTHS[0]))
                for i in LAYERS:
                    check(f"forward of {i}", held + gradients + formula.forward_of(i))
                check("between", held + gradients + formula.between())
                output.backward(torch.empty_like(output))
                del output
                for i in LAYERS:
                    check(f"backward of {i}", held + formula.backward_of(i, accumulating=gradients > 0))
                check("after backward", held + landed)
            assert not points, "computed more often than it should"
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            held = formula.chunks + 2 * sum(formula.S) + len(LAYERS) * BYTES  # two moments, and a scalar that counts steps
            check("after the step", held + landed)
            optimizer.zero_grad()
            check("after zero_grad", held)
        with torch.no_grad():
            model(torch.empty(0, WIDTHS[0]))
        points.clear()
        check("after evaluation", held)
        del model, optimizer
    check("after all", 0)


@WORLDS
@depths
@pytest.mark.parametrize("kept", [False, True])
def test_every_point_of_a_step(world_size: int, depth: int, kept: bool) -> None:
    check_steps(Formula(world_size, depth, kept=kept), world_size)


def on_gloo(rank: Rank, depth: int, near: bool) -> None:
    """What ranks compare, some bytes, gloo's thread lets go of a moment after the wait."""
    with patch.dict(os.environ, {"ZERO3_HOST_MEMORY": str(int(near))}):
        check_steps(GlooFormula(rank.world_size, depth, rank.number, near=near), world_size=None, slack=min(GIVEN) // 16)


@pytest.mark.parametrize("near", [True, False], ids=["memory", "sockets"])
@pytest.mark.parametrize(("world_size", "depth"), [(2, 0), (2, 1), (3, 2)])
def test_every_point_of_a_step_on_gloo(world_size: int, depth: int, near: bool) -> None:
    on_ranks(world_size, on_gloo, depth, near)


@WORLDS
@depths
@pytest.mark.parametrize("accumulating", [False, True])
def test_the_peak_of_a_step(world_size: int, depth: int, accumulating: bool) -> None:
    formula = Formula(world_size, depth)
    with LiveBytes() as live:
        model = make(world_size, prefetch_depth=depth)
        for _ in range(2 if accumulating else 1):
            peak = live.peak_of(lambda: model(torch.empty(0, WIDTHS[0])).sum().backward())
        scalars = 2 * BYTES  # the loss and its gradient
        expected = max(formula.peak_of_backward_of(i, accumulating=accumulating) for i in LAYERS)
        assert peak == formula.chunks + expected + scalars


@ranks
def test_the_peak_of_construction(world_size: int, rank: int) -> None:
    """A rank holds what it was given and the chunk of one layer. (Small parameters are copied together: here none is small.)"""
    formula = Formula(world_size, depth=1)
    with LiveBytes() as live, patch("zero3.build.scattering._SMALL_NUMEL", 1):
        blocks = [Block(number, lambda name: None) for number in LAYERS]
        layers: list[Zero3Layer] = []
        assert live.now == sum(GIVEN)
        for number in LAYERS:
            padding = formula.F[number] - GIVEN[number] if rank == 0 else 0
            done = sum(formula.S[:number]) + sum(formula.apart[:number])
            peak = live.peak_of(lambda: layers.append(wrap(blocks[number], world_size, rank)))  # noqa: B023
            later = formula.apart[number] - BYTES  # the trailer, which is made when the padding has gone
            assert peak == sum(GIVEN[number:]) + done + formula.S[number] + BYTES + max(padding, later)
        assert live.now == formula.chunks


def test_layers_given_on_the_meta_device_never_take_more_than_their_chunks() -> None:
    formula = Formula(2, depth=1)
    with LiveBytes() as live:
        layers: list[Zero3Layer] = []
        for number in LAYERS:
            with torch.device("meta"):
                block = Block(number, lambda name: None)
            peak = live.peak_of(lambda: layers.append(wrap(block, 2)))  # noqa: B023
            assert peak == sum(formula.S[: number + 1]) + sum(formula.apart[: number + 1])
        assert live.now == formula.chunks


@depths
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_never_more_full_layers_than_one_and_prefetch_depth(depth: int, reentrant: bool | None) -> None:
    """At no operation of training or evaluation, with a checkpoint in each layer or not."""
    most = 0

    def count() -> None:
        nonlocal most
        most = max(most, sum(presence != "released" for presence in presences(model)))

    with LiveBytes() as live:
        model = make(2, prefetch_depth=depth, reentrant=reentrant)
        live.at_every_operation = count
        for _ in range(2):
            model(torch.empty(0, WIDTHS[0], requires_grad=True)).sum().backward()
            with torch.no_grad():
                model(torch.empty(0, WIDTHS[0]))
    assert most == depth + 1


@WORLDS
@depths
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_each_layer_does_not_raise_the_peak(world_size: int, depth: int, reentrant: bool) -> None:
    formula = Formula(world_size, depth)
    with LiveBytes() as live:
        model = make(world_size, prefetch_depth=depth, reentrant=reentrant)
        peak = live.peak_of(lambda: model(torch.empty(0, WIDTHS[0], requires_grad=True)).sum().backward())
        expected = max(formula.peak_of_backward_of(i, accumulating=False) for i in LAYERS)
        assert formula.chunks + expected <= peak <= formula.chunks + expected + 4 * BYTES


def test_frozen_layers_have_no_gradients() -> None:
    """Gradients flow through the frozen ones in the middle, which take no more than their full parameters."""
    formula = Formula(2, depth=1)
    points: dict[str, int] = {}
    with LiveBytes() as live:
        model = make(2, lambda name: points.update({name: live.now}), frozen=(1, 2))
        output = model(torch.empty(0, WIDTHS[0]))
        output.backward(torch.empty_like(output))
        assert points["backward of 2"] == formula.chunks + formula.F[2] + formula.F[1] + formula.FG[3] + formula.G[3]
        assert points["backward of 1"] == formula.chunks + formula.F[1] + formula.F[0] + formula.G[3]
        assert points["backward of 0"] == formula.chunks + formula.F[0] + formula.G[3]
        assert live.now == formula.chunks + formula.G[0] + formula.G[3]


def test_an_outer_layer_is_full_from_its_forward_to_the_end_of_backward() -> None:
    formula = Formula(2, depth=1)
    points: dict[str, int] = {}

    class Outer(nn.Module):
        def __init__(self, inner: list[Zero3Layer]) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(WIDTHS[0], WIDTHS[0], bias=False), nn.ModuleList(inner)

        def forward(self, x: Tensor) -> Tensor:
            for module in (self.first, *self.inner):
                x = module(x)
            return x

    with LiveBytes() as live:
        at: Point = lambda name: points.update({name: live.now})  # noqa: E731
        model = wrap(Outer([wrap(Block(number, at), 2) for number in LAYERS]), 2)
        own = WIDTHS[0] * WIDTHS[0] * BYTES
        held = formula.chunks + own // 2 + 2 * BYTES
        for accumulating in (False, True):
            output = model(torch.empty(0, WIDTHS[0]))
            assert live.now == held + own + formula.between() + (sum(formula.G) + own // 2 + BYTES if accumulating else 0)
            output.backward(torch.empty_like(output))
        landed = sum(formula.G) + own // 2 + BYTES  # the trailer of its one slot
        assert points == {
            **{f"forward of {i}": held + own + landed + formula.forward_of(i) for i in LAYERS},
            **{f"backward of {i}": held + own + own // 2 + BYTES + formula.backward_of(i, accumulating=True) for i in LAYERS},
        }
        assert live.now == held + landed


@WORLDS
@pytest.mark.parametrize("failing", ["forward of 2", "backward of 1"])
def test_reset_after_an_exception_leaves_only_chunks(world_size: int, failing: str) -> None:
    def fail(name: str) -> None:
        if name == failing:
            raise KeyError(name)

    with LiveBytes() as live:
        model = make(world_size, fail)
        with pytest.raises(KeyError):
            model(torch.empty(0, WIDTHS[0])).sum().backward()
        reset(model)
        assert live.now == Formula(world_size, depth=1).chunks


@ranks
def test_full_state_dict_takes_one_full_layer_and_its_copies(world_size: int, rank: int) -> None:
    formula = Formula(world_size, depth=1)
    with LiveBytes() as live:
        model = make(world_size, rank=rank)
        copied = [sum(GIVEN[: i + 1]) if rank == 0 else 0 for i in LAYERS]
        at_most = max(formula.full(range(i, i + 1)) + copied[i] for i in LAYERS)
        assert live.peak_of(lambda: full_state_dict(model)) == formula.chunks + at_most
        state = full_state_dict(model)
        assert live.now == formula.chunks + copied[-1]
        load_full_state_dict(model, state)
        assert live.now == formula.chunks + copied[-1]


def test_clip_grad_norm_takes_only_scalars() -> None:
    with LiveBytes() as live:
        model = make(2)
        model(torch.empty(0, WIDTHS[0])).sum().backward()
        before = live.now
        assert live.peak_of(lambda: clip_grad_norm_(model, 1.0)) - before < 16 * 8
        assert live.now == before


def test_an_output_that_shows_a_parameter_keeps_one_buffer_until_it_is_gone() -> None:
    class Shows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(64.0))

        def forward(self) -> Tensor:
            return self.weight[1:]

    with LiveBytes() as live:
        model = wrap(Shows(), 2)
        chunk = 32 * BYTES + 2 * BYTES
        with torch.no_grad():
            shown = model()
        assert live.now == chunk + 64 * BYTES
        assert full_state_dict(model)["weight"][1:].equal(shown)
        del shown
        assert live.now == chunk
        shown = model()  # the layer lingers, its backward may come at once
        assert full_state_dict(model)["weight"][1:].equal(shown)
