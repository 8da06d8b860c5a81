"""load_pretrained in real processes on gloo: the same values."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import zero3
from tests.support.architectures import ARCHITECTURES
from tests.support.pretrained import assert_same_bits, on_meta, saved
from tests.support.processes import Rank, on_ranks
from tests.support.reference import Turn


def load_llama(rank: Rank, directory: str) -> tuple[dict[str, Tensor], float]:
    model = zero3.shard(on_meta(ARCHITECTURES["Llama"].build()))
    zero3.load_pretrained(model, directory)
    loss = model(**ARCHITECTURES["Llama"].inputs(Turn(0, 0, 1))).loss
    loss.backward()
    return zero3.full_state_dict(model, rank0_only=False), loss.item()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_values_are_those_of_from_pretrained(world_size: int, tmp_path: Path) -> None:
    expected = saved("Llama", tmp_path, "6KB")
    loss = expected(**ARCHITECTURES["Llama"].inputs(Turn(0, 0, 1))).loss.item()
    for state, found in on_ranks(world_size, load_llama, str(tmp_path)):
        assert_same_bits(state, expected.state_dict())
        assert found == pytest.approx(loss, rel=1e-12)
