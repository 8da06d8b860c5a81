"""save_checkpoint(frozen=False): adapters alone, and hashes of the base. Over another base it does not load."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zero3
from tests.support.adapters import adapted, same_bits, values_of
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn, process_group
from tests.support.stacks import Stack, train
from zero3.checkpoint import value_hashes as hashes

NUMBERS = hashes._numbers(torch.device("cpu"))
DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.int64,
    torch.float8_e4m3fn,
)


def bits_of(dtype: torch.dtype, numel: int, seed: int) -> Tensor:
    """Any bits, NaNs included."""
    drawn = torch.randint(256, (numel * dtype.itemsize,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return (drawn % 2 if dtype == torch.bool else drawn).view(dtype)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(0, 300_000), st.lists(st.integers(0, 300_000), max_size=4), st.integers(0, 9))
def test_the_hash_is_the_same_however_ranks_divide_the_values(dtype: torch.dtype, numel: int, cuts: list[int], seed: int) -> None:
    values = bits_of(dtype, numel, seed)
    edges = [0, *sorted(min(cut, numel) for cut in cuts), numel]
    parts = [hashes.part_of_hash(values[a:b], a, NUMBERS) for a, b in pairwise(edges)]
    assert sum(parts) % hashes._PRIME == hashes.part_of_hash(values, 0, NUMBERS)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 200_000), st.data())
def test_the_hash_sees_one_bit_and_two_values_that_change_places(dtype: torch.dtype, numel: int, data: st.DataObject) -> None:
    values = bits_of(dtype, numel, 0)
    before = hashes.part_of_hash(values, 0, NUMBERS)
    at, bit = data.draw(st.integers(0, numel - 1)), data.draw(st.integers(0, 0 if dtype == torch.bool else 8 * dtype.itemsize - 1))
    changed = values.clone()
    changed.view(torch.uint8)[at * dtype.itemsize + bit // 8] ^= 1 << bit % 8
    assert hashes.part_of_hash(changed, 0, NUMBERS) != before
    other = data.draw(st.integers(0, numel - 1))
    moved = values.clone()
    raw, source = moved.view(torch.uint8).view(numel, -1), values.view(torch.uint8).view(numel, -1)
    raw[at], raw[other] = source[other], source[at]
    assert (hashes.part_of_hash(moved, 0, NUMBERS) == before) == torch.equal(raw, source)


def test_the_hash_sees_two_signs_that_flip_and_a_block_that_moves() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    signs, moved = values.clone(), values.clone()
    signs[[3, 150_000]] *= -1
    moved[: 1 << 16], moved[1 << 16 : 1 << 17] = values[1 << 16 : 1 << 17], values[: 1 << 16]
    assert len({hashes.part_of_hash(each, 0, NUMBERS) for each in (values, signs, moved)}) == 3


# -- save_checkpoint and load_checkpoint


def sharded(group: ThreadCommunicator, change: str = "", **policy: Any) -> tuple[Stack, torch.optim.Optimizer]:
    model = adapted()
    with torch.no_grad():
        if change:
            model.get_parameter(change).view(-1)[-1] += 1e-12
    model = zero3.shard(model, policy=zero3.ShardingPolicy(**policy), process_group=process_group(group))
    return model, torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)


def saved_by(world_size: int, path: Path, **policy: Any) -> list[dict[str, Tensor]]:
    def save(group: ThreadCommunicator) -> dict[str, Tensor]:
        model, optimizer = sharded(group, **policy)
        train(model, Turn(0, 0, 1))
        optimizer.step()
        optimizer.zero_grad()
        zero3.save_checkpoint(path, model, optimizer, frozen=False)
        return zero3.full_state_dict(model, rank0_only=False)

    return run_ranks(world_size, save)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize("grouped", [True, False])
def test_frozen_false_loads_over_the_same_base_at_any_number_of_ranks(tmp_path: Path, before: int, after: int, grouped: bool) -> None:
    expected = saved_by(before, tmp_path / "saved", group_adapters=grouped)[0]

    def load(group: ThreadCommunicator) -> dict[str, Tensor]:
        model, optimizer = sharded(group, group_adapters=not grouped)
        zero3.load_checkpoint(tmp_path / "saved", model, optimizer)
        return zero3.full_state_dict(model, rank0_only=False)

    for found in run_ranks(after, load):
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_frozen_false_writes_what_trains_alone(tmp_path: Path) -> None:
    saved_by(2, tmp_path / "saved")
    manifest = json.loads((tmp_path / "saved" / "manifest.json").read_text())
    trained = {name for name, parameter in adapted().named_parameters() if parameter.requires_grad}
    assert {name for name, of in manifest["tensors"].items() if of["stored"]} == trained
    assert {name for name, of in manifest["tensors"].items() if "hash" in of} == manifest["tensors"].keys() - trained


@pytest.mark.parametrize("change", ["embed.weight", "blocks.1.up.weight", "norm.bias", "head.weight"])
def test_another_base_is_a_valueerror_on_all_ranks_before_anything_changes(tmp_path: Path, change: str) -> None:
    """The last bit of one value that one rank has."""
    saved_by(2, tmp_path / "saved")

    def load(group: ThreadCommunicator) -> str:
        model, optimizer = sharded(group, change)
        before = values_of(model, group)
        with pytest.raises(ValueError, match="over another base") as caught:
            zero3.load_checkpoint(tmp_path / "saved", model, optimizer)
        assert same_bits(values_of(model, group), before) and not optimizer.state
        train(model, Turn(0, 0, 1))
        return str(caught.value)

    texts = run_ranks(2, load)
    assert texts[0] == texts[1]
    assert "over another base than this Stack has; nothing was loaded" in texts[0] and f"other values: {change}." in texts[0]


def test_a_base_without_values_yet_is_told_of_and_can_be_loaded_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = saved_by(1, tmp_path / "saved")[0]
    with torch.device("meta"):
        model = adapted()
    zero3.shard(model, device="cpu")
    with caplog.at_level(logging.WARNING, "zero3"):
        zero3.load_checkpoint(tmp_path / "saved", model)
    assert "is loaded before it: 16 frozen parameters have no values yet" in caplog.text
    zero3.load_full_state_dict(model, expected)
    found = zero3.full_state_dict(model)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())
    train(model, Turn(0, 0, 1))  # all has values


def test_weights_false_compares_no_base(tmp_path: Path) -> None:
    saved_by(1, tmp_path / "saved")

    def load(group: ThreadCommunicator) -> None:
        model, optimizer = sharded(group, "head.weight")
        zero3.load_checkpoint(tmp_path / "saved", model, optimizer, weights=False)
        assert optimizer.state

    run_ranks(1, load)


def in_processes(rank: Rank, path: Path) -> str:
    model = zero3.shard(adapted())
    zero3.save_checkpoint(path, model, frozen=False)
    zero3.load_checkpoint(path, model)
    chunk = dict(model.blocks[2].named_parameters())["frozen_chunk"]
    if rank.number == 1:
        chunk.data[0] += 1
    with pytest.raises(ValueError, match="another base") as caught:
        zero3.load_checkpoint(path, model)
    return str(caught.value)


@pytest.mark.slow
def test_base_hashes_in_processes(tmp_path: Path) -> None:
    first, second = on_ranks(2, in_processes, tmp_path / "saved")
    assert first == second
