"""The arithmetic of formats on a GPU, in one kernel where torch's operations are up to eighteen:
written in Triton, which comes with torch for CUDA. Bits are those of `blocks`, and of the codecs,
but for blocks with infinities or NaN, which become others.

A kernel runs in the current stream. `kernels_on` imports this file.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.runtime import driver

from .blocks import FLOAT8_MAX, INT8_MAX
from .kernels import FourBits, Tiles
from .sections import QuantizedTensor

__all__: list[str] = []

_TILE = 4096  # elements that a program works on, unless a block is longer
# dtype of codes -> what a block's largest value is multiplied with, as torch divides on a GPU
_INVERSE = MappingProxyType(
    {
        torch.int8: (1 / torch.tensor(INT8_MAX, dtype=torch.float32)).item(),
        torch.float8_e4m3fn: (1 / torch.tensor(FLOAT8_MAX, dtype=torch.float32)).item(),
    }
)


def knows(codes: torch.dtype) -> bool:
    """Whether the current device has numbers of this dtype."""
    # from compute capability 8.9 on
    return codes != torch.float8_e4m3fn or int(driver.active.get_current_target().arch) >= 89


def encode(values: Tensor, codes: Tensor, scales: Tensor, size: int, key: int | None) -> None:
    """Writes the codes, and the scales, of blocks of `size` elements; the last may be short.

    Args:
        values: `[n]`, of any floating dtype.
        codes: Where codes come, `[n]`, int8 or float8_e4m3fn.
        scales: Where scales come, one for each block, float32.
        size: The length of a block.
        key: Of `uniform`, for stochastic rounding. None: to the nearest.
    """
    width = triton.next_power_of_2(size)
    rows = max(1, _TILE // width)
    grid = (triton.cdiv(triton.cdiv(values.numel(), size), rows),)
    numbers = (values.numel(), key or 0, _INVERSE[codes.dtype], size, width, rows)
    kinds, warps = (codes.dtype == torch.int8, key is not None), min(16, max(4, width // 2048))
    with _on(values):
        _encode[grid](values, codes, scales, *numbers, *kinds, num_warps=warps)


def decode(codes: Tensor, scales: Tensor, out: Tensor, size: int, *, add: bool) -> None:
    """Writes what blocks of `size` elements stand for into `out` `[n]`, or adds it there."""
    _run(_decode, codes, scales, out, 0, out.numel(), 1, size, 1, size, add, _TILE)


def decode_tiles(kind: Tiles, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
    """Writes the elements `[start, start + len(out))`, of codes of eight bits, into `out`, 1-D, of
    any floating dtype.
    """
    numbers = (start, out.numel(), *kind, False, _TILE)
    _run(_decode, quantized.codes, quantized.scales, out, *numbers)


def decode_pairs(kind: FourBits, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
    """Writes the elements `[start, start + len(out))` of codes of four bits into `out`, 1-D, of any
    floating dtype.
    """
    tables = (kind.values, kind.scales, quantized.scale_scales, quantized.offset)
    numbers = (start, out.numel(), kind.size, kind.first, quantized.scales_together, _TILE)
    _run(_decode_pairs, quantized.codes, quantized.scales, out, *tables, *numbers)


def _run(kernel: Any, codes: Tensor, scales: Tensor, out: Tensor, *more: Any) -> None:
    grid = (triton.cdiv(out.numel(), _TILE),)
    with _on(out):  # not fused, a product is rounded before something is added
        kernel[grid](codes, scales, out, *more, enable_fp_fusion=False)


def _on(tensor: Tensor) -> AbstractContextManager[None]:
    """Triton takes the current device, whatever it is given."""
    found: AbstractContextManager[None] = driver.active.get_device_interface().device(tensor.device)
    return found


@triton.jit(do_not_specialize=("key",))  # type: ignore[untyped-decorator]
def _encode(  # type: ignore[no-untyped-def]
    values,
    codes,
    scales,
    numel,
    key,
    inverse,
    size: tl.constexpr,
    width: tl.constexpr,
    rows: tl.constexpr,
    whole: tl.constexpr,
    noisy: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    lane = tl.arange(0, width)[None, :]
    place = block[:, None] * size + lane
    inside = (lane < size) & (place < numel)
    found = tl.load(values + place, inside, other=0.0).to(tl.float32)
    broken = tl.max((found != found).to(tl.int32), 1) > 0  # `tl.max` leaves out what is no number
    scale = tl.where(broken, float("nan"), tl.max(tl.abs(found), 1) * inverse)
    tl.store(scales + block, scale, block * size < numel)
    quotient = tl.div_rn(found, tl.where(scale == 0, 1.0, scale)[:, None])
    if noisy:  # `uniform`
        bits = place.to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32)
        bits = (bits ^ (bits >> 16)) * 0x7FEB352D
        bits = (bits ^ (bits >> 15)) * 0x846CA68B
        bits = ((bits ^ (bits >> 16)) >> 9) | 0x3F800000
        quotient = tl.floor(quotient + (bits.to(tl.float32, bitcast=True) - 1))
    elif whole:
        # float32 has no halves from 2 ** 23 on: this rounds, and halves to the even integer
        quotient = (quotient + 12582912.0) - 12582912.0
    largest = 127.0 if whole else 448.0
    quotient = tl.minimum(tl.maximum(quotient, -largest), largest)
    tl.store(codes + place, quotient.to(codes.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _decode(  # type: ignore[no-untyped-def]
    codes,
    scales,
    out,
    start,
    numel,
    rows: tl.constexpr,
    columns: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    add: tl.constexpr,
    tile: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = number < numel
    place = start + number
    row = place // columns
    band = row // rows * tl.cdiv(rows, height) + row % rows // height
    block = band * tl.cdiv(columns, width) + place % columns // width
    value = tl.load(codes + place, inside).to(tl.float32) * tl.load(scales + block, inside)
    if add:
        value += tl.load(out + number, inside)
    tl.store(out + number, value.to(out.dtype.element_ty), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_pairs(  # type: ignore[no-untyped-def]
    codes,
    scales,
    out,
    values,
    known,
    common,
    offset,
    start,
    numel,
    size: tl.constexpr,
    first: tl.constexpr,
    together: tl.constexpr,
    tile: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    inside = number < numel
    place = start + number
    pair = tl.load(codes + place // 2, inside, other=0)
    code = (pair >> tl.where(place % 2 == 0, first, 4 - first).to(tl.uint8)) & 15
    block = place // size
    scale = tl.load(scales + block, inside, other=0)
    if known is not None:
        scale = tl.load(known + scale)
    if common is not None:
        scale = scale * tl.load(common + block // together, inside) + tl.load(offset)
    value = tl.load(values + code) * scale
    tl.store(out + number, value.to(out.dtype.element_ty), inside)
