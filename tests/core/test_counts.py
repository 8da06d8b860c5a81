"""The exact collectives of a step, in their order, with what computes between them; the same on every rank.

`tests/support/stories.py` says how to read a story: `g1 f0` is a prefetch, layer 1 travels while layer 0 computes.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.stories import SLOTS, Block, Container, Embracing, Teller, bytes_of, steps_of, told
from zero3 import ShardingPolicy, Zero3Layer

STEP = "g0 g1 f0 g2 f1 g3 f2 f3 | g2 b3 r3 g1 b2 r2 g0 b1 r1 b0 r0"

# -- plain


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_step_gathers_each_layer_twice_but_the_last_and_reduces_it_once(world_size: int) -> None:
    first, later = steps_of(lambda teller: teller.sequential(teller.blocks()), world_size)
    assert later == STEP
    assert first == STEP.replace("|", "| x"), "the first backward compares its order, once"


@pytest.mark.parametrize(
    ("depth", "story"),
    [
        (0, "g0 f0 g1 f1 g2 f2 g3 f3 | b3 r3 g2 b2 r2 g1 b1 r1 g0 b0 r0"),
        (1, STEP),
        (2, "g0 g1 g2 f0 g3 f1 f2 f3 | g2 g1 b3 r3 g0 b2 r2 b1 r1 b0 r0"),
        (3, "g0 g1 g2 g3 f0 f1 f2 f3 | g2 g1 g0 b3 r3 b2 r2 b1 r1 b0 r0"),
    ],
)
def test_prefetch_depth_layers_are_gathered_ahead_of_the_one_that_computes(depth: int, story: str) -> None:
    assert steps_of(lambda teller: teller.sequential(teller.blocks(), prefetch_depth=depth))[1] == story


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bytes_of_a_step(world_size: int, dtype: torch.dtype) -> None:
    def body(teller: Teller) -> list[dict[str, int]]:
        model = teller.sequential([block.to(dtype) for block in teller.blocks()])
        found = []
        for _ in range(2):
            teller.communicator.log.clear()
            model(torch.randn(2, 4, dtype=dtype)).sum().backward()
            found.append(bytes_of(teller.communicator.log))
        return found

    full = [-(-numel // world_size) * world_size * dtype.itemsize for numel in (30, 35, 42, 24)]
    trailers = 4 * SLOTS * world_size * dtype.itemsize  # an element for each slot behind each slice: has a gradient reached it?
    first, later = told(body, world_size)
    assert later == {"all_gather": 2 * sum(full) - full[-1], "reduce_scatter": sum(full) + trailers}
    assert first == {**later, "exchange": 16}, "what ranks compare is a few bytes"


# -- what may be called when


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_in_a_layer_gathers_nothing_more(reentrant: bool) -> None:
    _, later = steps_of(lambda teller: teller.sequential(teller.blocks(reentrant)), input_needs_grad=True)
    assert later == "g0 g1 f0 g2 f1 g3 f2 f3 | g2 f3 b3 r3 g1 f2 b2 r2 g0 f1 b1 r1 f0 b0 r0"


@pytest.mark.parametrize(
    ("reentrant", "story"),
    [
        (None, "g0 f0 g1 f1 g2 f2 g3 f3 | g2 b3 r3 g1 b2 r2 g0 b1 r1 b0 r0"),
        (False, "g0 f0 g1 f1 g2 f2 g3 f3 | g2 f3 b3 r3 g1 f2 b2 r2 g0 f1 b1 r1 f0 b0 r0"),
        # A reentrant checkpoint runs its forward without gradients: nobody knows that the last layer is needed again.
        (True, "g0 f0 g1 f1 g2 f2 g3 f3 | g3 f3 b3 r3 g2 f2 b2 r2 g1 f1 b1 r1 g0 f0 b0 r0"),
    ],
)
def test_a_container_of_ones_own_gathers_layers_as_it_calls_them(reentrant: bool | None, story: str) -> None:
    def make(teller: Teller) -> Container:
        return Container([teller.wrap(block, str(block.number), ShardingPolicy()) for block in teller.blocks()], reentrant=reentrant)

    first, later = steps_of(make, input_needs_grad=True)
    assert later == story
    assert [word for word in first.split() if word != "x"] == later.split()
    assert "x" in first, "ranks compare each layer before they first gather it"


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_stable_step_needs_no_word(reentrant: bool | None) -> None:
    """Under an outer layer, checkpoints around the inner ones: reentrant ones make a backward of its own for each."""

    def make(teller: Teller) -> Zero3Layer:
        layers = [teller.wrap(block, str(block.number), ShardingPolicy()) for block in teller.blocks()]
        return teller.wrap(Container(layers, reentrant=reentrant), "o", ShardingPolicy())

    first, later = steps_of(make, input_needs_grad=True)
    assert "x" in first and "x" not in later
    assert later.split("|")[0] == "g0 g1 f0 g2 f1 g3 f2 f3 "


def test_a_layer_called_twice_in_a_forward_is_reduced_once() -> None:
    def make(teller: Teller) -> Zero3Layer:
        torch.manual_seed(0)
        square = Block(0, teller.communicator.log)
        square.linear = nn.Linear(4, 4)
        other = Block(1, teller.communicator.log)
        other.linear = nn.Linear(4, 5)
        layers = [teller.wrap(square, "0", ShardingPolicy()), teller.wrap(other, "1", ShardingPolicy())]
        return teller.wrap(Container(layers, calls=(0, 0, 1)), "", ShardingPolicy())

    assert steps_of(make)[1] == "g0 f0 g1 f0 f1 | g0 b1 r1 b0 b0 r0"


def test_an_outer_layer_is_gathered_once_and_reduced_last() -> None:
    def make(teller: Teller) -> Zero3Layer:
        inner = [teller.wrap(block, str(block.number), ShardingPolicy()) for block in teller.blocks()]
        return teller.wrap(Embracing(inner), "o", ShardingPolicy())

    first, later = steps_of(make)
    assert later == "go g0 g1 f0 g2 f1 g3 f2 f3 | g2 b3 r3 g1 b2 r2 g0 b1 r1 b0 r0 ro"
    assert first == "x go x g0 f0 x g1 f1 x g2 f2 x g3 f3 | x g2 b3 r3 g1 b2 r2 g0 b1 r1 b0 r0 ro"


def test_a_lone_zero3layer_is_gathered_once() -> None:
    first, later = steps_of(lambda teller: teller.wrap(teller.blocks()[0], "0", ShardingPolicy()))
    assert later == "g0 f0 | b0 r0"
    assert sorted(first.split()) == sorted([*later.split(), "x", "x"])


def test_reshard_after_forward_false_gathers_once() -> None:
    _, later = steps_of(lambda teller: teller.sequential(teller.blocks(), reshard_after_forward=False))
    assert later == "g0 g1 f0 g2 f1 g3 f2 f3 | b3 r3 b2 r2 b1 r1 b0 r0"


# -- what is trained


@pytest.mark.parametrize(
    ("frozen", "story"),
    [
        # Nothing flows through the first: their backward does not exist.
        ((0,), "g0 g1 f0 g2 f1 g3 f2 f3 | g2 b3 r3 g1 b2 r2 b1 r1"),
        ((0, 1, 2), "g0 g1 f0 g2 f1 g3 f2 f3 | b3 r3"),
        # Gradients flow through the others: gathered, never reduced.
        ((1, 2), "g0 g1 f0 g2 f1 g3 f2 f3 | g2 b3 r3 g1 b2 g0 b1 b0 r0"),
        ((3,), "g0 g1 f0 g2 f1 g3 f2 f3 | g2 b3 g1 b2 r2 g0 b1 r1 b0 r0"),
    ],
)
def test_frozen_layers_are_never_reduced_and_gathered_only_where_gradients_flow(frozen: tuple[int, ...], story: str) -> None:
    assert steps_of(lambda teller: teller.sequential(teller.blocks(frozen=frozen)))[1] == story


def test_chunks_frozen_later_are_reduced_no_more() -> None:
    def body(teller: Teller) -> list[str]:
        model = teller.sequential(teller.blocks())
        teller.step(model)
        for number in (0, 2):
            for chunk in model[number].get_trainable_chunk():
                chunk.requires_grad_(False)
        return [teller.step(model) for _ in range(2)][1:]

    assert told(body) == ["g0 g1 f0 g2 f1 g3 f2 f3 | g2 b3 r3 g1 b2 b1 r1"]


def test_each_dtype_travels_in_a_chunk_of_its_own() -> None:
    """A frozen half-precision base under trainable parameters: the base is never reduced."""

    def body(teller: Teller) -> tuple[str, dict[str, int]]:
        torch.manual_seed(0)
        blocks = teller.blocks()
        for block in blocks:
            block.base = nn.Parameter(torch.randn(64 + 2 * block.number, dtype=torch.bfloat16), requires_grad=False)
        model = teller.sequential(blocks)
        teller.step(model)
        model(torch.randn(2, 4)).sum().backward()
        return bytes_of(teller.communicator.log), teller.story()

    found, story = told(body)
    full, base = [30 * 4, 36 * 4, 42 * 4, 24 * 4], [64 * 2, 66 * 2, 68 * 2, 70 * 2]
    assert found == {"all_gather": 2 * sum(full + base) - full[-1] - base[-1], "reduce_scatter": sum(full) + 4 * SLOTS * 2 * 4}
    gathers = [word for word in story.split() if word.startswith("g")]
    assert sorted(gathers) == sorted(["g0t", "g0f", "g1t", "g1f", "g2t", "g2f"] * 2 + ["g3t", "g3f"])
    assert [word for word in story.split() if word.startswith("r")] == ["r3t", "r2t", "r1t", "r0t"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_uses_no_parameter_keeps_step_with_the_others(world_size: int) -> None:
    """Each rank leaves out another layer, the last rank all of them."""

    def body(teller: Teller) -> str:
        blocks = teller.blocks()
        rank = teller.communicator.rank
        for block in blocks:
            block.uses_parameters = rank != world_size - 1 and block.number != rank
        model = teller.sequential(blocks)
        teller.step(model, input_needs_grad=True)
        story = teller.step(model, input_needs_grad=True)
        reached = [(number < 2 and world_size == 3) or number > 0 for number in range(4)]
        assert [chunk.grad is not None for chunk in model.get_trainable_chunk()] == reached
        return story

    assert told(body, world_size) == STEP
