"""report: what a model holds, against what is really there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.footprint import LAYERS, Formula, make
from tests.support.inside import accounts_of, chunks_of, held_bytes, most_of_gradients
from tests.support.live import LiveBytes, LonelyCommunicator
from tests.support.models import WORLDS
from tests.support.stacks import Block, Stack
from zero3 import ShardingPolicy, Zero3Layer


@WORLDS
def test_its_bytes_are_those_of_the_formula(world_size: int) -> None:
    formula = Formula(world_size, 1)
    found = zero3.report(make(world_size))
    assert found.chunks == {"trainable float32": sum(formula.S)}
    assert found.gradients == sum(formula.S)
    assert found.full_parameters == (sum(sorted(formula.F)[-2:]) if world_size > 1 else 0)  # whichever layers are neighbours
    assert found.layers == len(LAYERS)


def test_dtypes_are_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16).requires_grad_(False))
    policy = ShardingPolicy(param_dtype=torch.bfloat16)
    layer = Zero3Layer(model, policy=policy, process_group=LonelyCommunicator(2))
    with LiveBytes() as live:
        assert live.peak_of(lambda: zero3.report(layer)) == live.now
    found = zero3.report(layer)
    assert found.chunks == {"trainable float32": 40, "frozen bfloat16": 20}
    assert found.gathered == {"bfloat16": 80}
    text = str(found)
    assert "\n" not in text
    for part in ("rank 0 of 2", "trainable float32 0.0 MB", "Computes in bfloat16", repr(policy)):
        assert part in text


@pytest.mark.parametrize("world_size", [1, 2])
def test_report_names_the_largest_layer_and_the_root(world_size: int) -> None:
    model = Stack(Block(7), Block(9), Block(8))  # 4 bytes a number
    group = LonelyCommunicator(world_size) if world_size > 1 else None
    found = zero3.report(zero3.shard(model, process_group=group, policy=ShardingPolicy(param_dtype=torch.bfloat16)))
    words = 23 * 5 + 23 * 5 % world_size
    assert (found.largest_layer, found.largest_layer_bytes) == ("'embed' (Embedding)", 2 * words)
    assert found.root_bytes == 2 * 10, "norm.weight and norm.bias"
    assert "The largest layer is 'embed' (Embedding) with 0.0 MB, the root's own holds 0.0 MB." in str(found)


def test_report_of_a_root_that_is_larger_than_every_layer() -> None:
    found = zero3.report(zero3.shard(Stack(Block(7), Block(9), tied=True, words=100_000)))
    assert (found.largest_layer, found.largest_layer_bytes) == ("'blocks.1' (Block)", 4 * (2 * 9 * 5 + 9 + 5))
    assert found.root_bytes == 4 * (100_000 * 5 + 10)
    assert "The largest layer is 'blocks.1' (Block) with 0.0 MB, the root's own holds 2.0 MB." in str(found)


POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "nothing ahead": {"prefetch_depth": 0},
    "two ahead": {"prefetch_depth": 2},
    "kept": {"reshard_after_forward": False},
    "stage 2": {"stage": 2},
    "bf16": {"param_dtype": torch.bfloat16},
    "resident": {"resident_bytes": 10**6},
    "some resident": {"resident_bytes": 4 * 82},
}


AROUND = pytest.mark.parametrize("around", ["a root", "a layer of its own", "nothing"])


def blocks_with(around: str, chosen: ShardingPolicy) -> tuple[nn.Module, Tensor]:
    """Blocks of one size, of which one is frozen, and inputs."""
    group, blocks = LonelyCommunicator(2), [Block(7) for _ in range(5)]
    blocks[2].requires_grad_(False)
    if around == "a root":
        model: nn.Module = zero3.shard(Stack(*blocks, words=8), Block, process_group=group, policy=chosen)
        return model, torch.ones(2, 3, dtype=torch.int64)
    layers: list[nn.Module] = [Zero3Layer(block, process_group=group, policy=chosen) for block in blocks]
    if around == "nothing":
        return zero3.Zero3Sequential(layers), torch.ones(2, 5)
    return Zero3Layer(nn.Sequential(*layers, nn.Linear(5, 5)), process_group=group, policy=chosen), torch.ones(2, 5)


@AROUND
@pytest.mark.parametrize("policy", POLICIES)
def test_full_parameters_are_the_most_that_a_step_holds(policy: str, around: str) -> None:
    model, inputs = blocks_with(around, ShardingPolicy(**POLICIES[policy]))
    told, most = zero3.report(model).full_parameters, 0

    def look() -> None:
        nonlocal most
        most = max(most, sum(held_bytes(model).values()))

    with LiveBytes() as live:
        live.at_every_operation = look
        for _ in range(2):
            model(inputs).sum().backward()
    assert zero3.report(model).full_parameters == told
    assert told == most if "resident" not in policy else most <= told <= most + 4 * 82


def test_full_parameters_that_all_stay_are_counted_once() -> None:
    chosen = ShardingPolicy(resident_bytes=10**6)
    blocks = [Zero3Layer(Block(7).requires_grad_(False), process_group=LonelyCommunicator(2), policy=chosen) for _ in range(5)]
    model = zero3.Zero3Sequential(blocks)
    model(torch.ones(2, 5))
    assert zero3.report(model).full_parameters == sum(held_bytes(model).values()) == 5 * 4 * 82


def test_frozen_parameters_that_are_their_chunk_are_no_full_parameters_beside_others() -> None:
    """On one rank, in the dtype that computes."""
    chosen, most = ShardingPolicy(param_dtype=torch.bfloat16, resident_bytes=10**6), 0
    blocks = [Block(7), Block(7), Block(70).to(torch.bfloat16).requires_grad_(False), Block(7)]
    model = zero3.Zero3Sequential([Zero3Layer(block, policy=chosen) for block in blocks])
    chunks = [chunk for chunk in chunks_of(model) if chunk.shard.requires_grad]

    def look() -> None:
        nonlocal most
        most = max(most, sum(chunk.full.tensor.untyped_storage().nbytes() for chunk in chunks))

    with LiveBytes() as live:
        live.at_every_operation = look
        model(torch.ones(2, 5)).sum().backward()
    assert zero3.report(model).full_parameters == most == 2 * 2 * 82


@AROUND
@pytest.mark.parametrize("policy", POLICIES)
def test_full_gradients_are_the_most_that_a_step_holds(policy: str, around: str) -> None:
    """But for the trailers of those on their way: for each of a block's 4 parameters and each rank an element."""
    chosen = ShardingPolicy(**POLICIES[policy])
    model, inputs = blocks_with(around, chosen)
    ahead, itemsize = max(chosen.prefetch_depth, 1), (chosen.param_dtype or torch.float32).itemsize
    with most_of_gradients(model) as most:
        model(inputs).sum().backward()
    assert zero3.report(model).full_gradients == max(most) - ahead * 2 * 4 * itemsize


@AROUND
def test_full_gradients_that_are_kept_are_those_of_all_layers(around: str) -> None:
    model, inputs = blocks_with(around, ShardingPolicy(stage=1))
    model(inputs).sum().backward()
    kept = [(account.chunk, tensor) for account in accounts_of(model) for tensor in account.held]
    trailers = sum(2 * len(chunk.layout.slots) * 4 for chunk, _ in kept)
    assert zero3.report(model).full_gradients == sum(tensor.nbytes for _, tensor in kept) - trailers


def test_report_of_lone_layers_has_no_root() -> None:
    found = zero3.report(Zero3Layer(nn.Linear(4, 4)))
    assert (found.largest_layer, found.largest_layer_bytes, found.root_bytes) == ("Linear", 80, None)
    assert "The largest layer is Linear with 0.0 MB. " in str(found)


def test_nothing_sharded_is_an_error() -> None:
    with pytest.raises(ValueError, match="is sharded"):
        zero3.report(nn.Linear(2, 2))


def test_rounding_on_the_way_is_named_with_its_bias() -> None:
    def text(shards: int, **policy: zero3.Int8) -> str:
        group = LonelyCommunicator(shards) if shards > 1 else None
        return str(zero3.report(Zero3Layer(nn.Linear(4, 4), policy=ShardingPolicy(**policy), process_group=group)))

    both = text(2, gather_format=zero3.Int8(), reduce_format=zero3.Int8(64))
    assert "Weights travel as int8(256), and what computes is rounded to it: that is a bias. " in both
    assert "Gradients travel as int8(64), rounded to the nearest code: that is a bias. " in both
    assert "rounded at random, without a bias. " in text(2, reduce_format=zero3.Int8(stochastic=True))
    assert "travel" not in text(2) + text(1, gather_format=zero3.Int8(), reduce_format=zero3.Int8())
