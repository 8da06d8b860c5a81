"""Parameters dealt out from where they lie: every rank's chunk, to the bit, is its slice of all of them side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.core.test_layout import DTYPES, distinct, layouts
from tests.support.processes import Rank, on_ranks
from zero3.build.scattering import scatter_parameters
from zero3.comm.factory import communicator_for
from zero3.comm.streams import Pending
from zero3.core.layout import ChunkLayout


@dataclass
class Delivery:
    """Arrives when it is waited for; what was there before is gone at once."""

    place: Tensor
    slices: list[Tensor]
    rank: int

    def __post_init__(self) -> None:
        self.place.fill_(1)

    def wait(self) -> None:
        self.place.copy_(self.slices[self.rank])


@dataclass
class InTurn:
    """The ranks one after another, rank 0 first: what it deals lies here for the others."""

    world_size: int
    rank: int = 0
    dealt: list[list[Tensor]] = field(default_factory=list)
    taken: int = 0

    @property
    def shards(self) -> int:
        return self.world_size

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Any = None) -> Pending:
        assert (slices is not None) == (self.rank == 0)
        if slices is not None:
            assert all(each.is_contiguous() for each in slices)
            self.dealt.append(slices)
        self.taken += 1
        lengths = {each.numel() for each in self.dealt[self.taken - 1]}
        assert lengths == {shard.numel()} and len(self.dealt[self.taken - 1]) == self.world_size
        return Delivery(shard, self.dealt[self.taken - 1], self.rank)

    def chunks(self, layout: ChunkLayout, values: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        found = []
        for rank in range(self.world_size):
            self.rank, self.taken = rank, 0
            found.append(torch.full((layout.shard_numel,), 99).to(dtype))
            scatter_parameters(found[-1], layout, self, values.__getitem__ if rank == 0 else None)  # type: ignore[arg-type]
            assert self.taken == len(self.dealt), "a rank takes part in other transfers than rank 0"
        return found


@given(layouts(), st.sampled_from(DTYPES), st.sampled_from([1, 4, 16, 2**15]))
def test_every_chunk_is_its_slice_of_the_parameters_side_by_side(layout: ChunkLayout, dtype: torch.dtype, small: int) -> None:
    values = [distinct(slot.numel, dtype, start=17 * i + 1).view(slot.shape) for i, slot in enumerate(layout.slots)]
    padding = torch.zeros(layout.padded_numel - layout.numel, dtype=dtype)
    expected = torch.cat([*(value.flatten() for value in values), padding])
    with patch("zero3.build.scattering._SMALL_NUMEL", small):
        chunks = InTurn(layout.world_size).chunks(layout, values, dtype)
    assert torch.equal(torch.cat(chunks), expected)


@given(st.integers(2, 6), st.integers(2, 6), st.integers(1, 5), st.sampled_from([1, 2**15]))
def test_any_strides_will_do(rows: int, columns: int, world_size: int, small: int) -> None:
    layout = ChunkLayout.build([("transposed", (rows, columns)), ("strided", (rows,)), ("stretched", (rows, columns))], world_size)
    given_values = {
        "transposed": torch.randn(columns, rows).t(),
        "strided": torch.randn(2 * rows)[::2],
        "stretched": torch.randn(()).expand(rows, columns),
    }
    values = [given_values[slot.name] for slot in layout.slots]
    with patch("zero3.build.scattering._SMALL_NUMEL", small):
        chunks = InTurn(world_size).chunks(layout, values, torch.float32)
    assert torch.equal(torch.cat(chunks)[: layout.numel], torch.cat([value.flatten() for value in values]))


def test_a_large_parameter_is_sent_from_where_it_lies() -> None:
    layout = ChunkLayout.build([("large", (2**8, 2**8)), ("bias", (2**8,)), ("other", (2**16,))], 2)
    large, bias, other = torch.randn(2**8, 2**8), torch.randn(2**8), torch.randn(2**16)
    ranks = InTurn(2)
    ranks.chunks(layout, [large, bias, other], torch.float32)
    sent = sum(piece.numel() for slices in ranks.dealt for piece in slices if any(lies_in(piece, whole) for whole in (large, other)))
    assert sent == large.numel() + other.numel()


def lies_in(piece: Tensor, whole: Tensor) -> bool:
    return piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def deal(rank: Rank) -> None:
    values = [torch.randn(70_000), torch.randn(300, 200), torch.randn(()), torch.randn(40_000, 2).t(), torch.randn(11)]
    torch.distributed.broadcast_object_list(values)
    layout = ChunkLayout.build([(str(i), tuple(value.shape)) for i, value in enumerate(values)], rank.world_size)
    ordered = [values[int(slot.name)] for slot in layout.slots]
    chunk = torch.full((layout.shard_numel,), float("nan"))
    scatter_parameters(chunk, layout, communicator_for(None, torch.device("cpu")), ordered.__getitem__ if rank.number == 0 else None)
    expected = torch.zeros(layout.padded_numel)
    expected[: layout.numel] = torch.cat([value.flatten() for value in ordered])
    assert torch.equal(chunk, expected[slice(*layout.chunk_range(rank.number))])


def test_over_gloo() -> None:
    for outcome in on_ranks(3, deal):
        assert outcome is None or not outcome.error, outcome
