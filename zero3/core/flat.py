"""Cut and shape: pure functions between parameters' shapes and a flat buffer, over a ChunkLayout."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import ChunkLayout

__all__: list[str] = []


def unpack(full: Tensor, layout: ChunkLayout) -> list[Tensor]:
    """One view of `full` `[W*S]` a slot, in the slots' shapes."""
    return [view(full, layout, index) for index in range(len(layout.slots))]


def view(full: Tensor, layout: ChunkLayout, index: int) -> Tensor:
    """The slot number `index` as a view of `full`, in its parameter's shape."""
    slot = layout.slots[index]
    return full.as_strided(slot.shape, slot.stride, full.storage_offset() + slot.offset)  # one call of torch, not two


def zero_padding(full: Tensor, layout: ChunkLayout) -> Tensor:
    if layout.numel < layout.padded_numel:
        full[layout.numel :].zero_()
    return full


def split(full: Tensor, layout: ChunkLayout) -> list[Tensor]:
    """The chunks `[S]` of `full` `[W*S]`, one a rank, as views."""
    return [full[slice(*layout.chunk_range(rank))] for rank in range(layout.world_size)]


def not_a_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-dim tensor to stretch over a released parameter's shape: NaN, so that a value used by mistake is loud."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device)
