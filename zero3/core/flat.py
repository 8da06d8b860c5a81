"""Functions that cut a flat buffer into slots, and into chunks, by a ChunkLayout."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import ChunkLayout

__all__: list[str] = []


def unpack(full: Tensor, layout: ChunkLayout) -> list[Tensor]:
    """One view of `full` `[W*S]` for each slot, in the slot's shape."""
    return [view(full, layout, index) for index in range(len(layout.slots))]


def view(full: Tensor, layout: ChunkLayout, index: int) -> Tensor:
    """Slot number `index` as a view of `full`, in the slot's shape."""
    slot = layout.slots[index]
    # faster than a slice and a view
    return full.as_strided(slot.shape, slot.stride, full.storage_offset() + slot.offset)


def zero_padding(full: Tensor, layout: ChunkLayout) -> Tensor:
    if layout.numel < layout.padded_numel:
        full[layout.numel :].zero_()
    return full


def split(full: Tensor, layout: ChunkLayout) -> list[Tensor]:
    """The chunks `[S]` of `full` `[W*S]` as views, one for each rank."""
    return [full[slice(*layout.chunk_range(rank))] for rank in range(layout.world_size)]


def not_a_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-dim tensor to expand to a released parameter's shape. It is NaN, so that a value used by
    mistake shows in the results.
    """
    # these have no NaN
    if dtype == torch.float4_e2m1fn_x2 or not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros((), dtype=dtype, device=device)
    return torch.full((), float("nan"), dtype=dtype, device=device)
