"""Triton's kernels have the bits of torch's operations.

pytest tests/quantized/test_fused.py                       on a GPU
TRITON_INTERPRET=1 pytest tests/quantized/test_fused.py    as Triton's interpreter runs them, but for its rounding to 8 and 16 bits
"""

from __future__ import annotations

import math
import os
import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.quantized.test_wire import drawn
from zero3 import MXFP4, NF4, Float8, Int8

REAL = torch.cuda.is_available() and "tests.device.simulated" not in sys.modules
DEVICE = torch.device("cuda" if REAL else "cpu")
EXACT = [torch.float32, torch.float64, *([torch.bfloat16, torch.float16] if REAL else [])]

pytest.importorskip("triton", reason="Triton is not installed: it comes with torch for CUDA")
if not REAL and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and Triton's interpreter was not asked for", allow_module_level=True)
from zero3.quantized import fused as kernels  # noqa: E402


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    if not REAL:
        monkeypatch.setattr(kernels, "_on", lambda tensor: nullcontext())
    return kernels


def uniform(key: int, count: int) -> Tensor:
    """The hash of places and a key, in NumPy's integers, which go around."""
    bits = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(key % 2**32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    bits = (bits ^ (bits >> np.uint32(16))) >> np.uint32(9)
    return torch.from_numpy((bits | np.uint32(0x3F800000)).view(np.float32) - 1).to(DEVICE)


def in_blocks(values: Tensor, size: int, kind: torch.dtype, noise: int | None) -> tuple[Tensor, Tensor]:
    """Codes and scales, by torch's operations."""
    largest = 127 if kind == torch.int8 else 448
    scales = torch.stack([part.float().abs().amax() for part in values.split(size)]) / largest
    spread = scales.repeat_interleave(size)[: values.numel()]
    quotients = values.float() / torch.where(spread == 0, 1, spread)
    if noise is not None:
        quotients = (quotients + uniform(noise, values.numel())).floor()
    elif kind == torch.int8:
        quotients = quotients.round()
    return quotients.clamp(-largest, largest).to(kind), scales


@pytest.mark.parametrize("noise", [None, -77, 2**31 - 1])
@pytest.mark.parametrize("size", [1, 7, 256, 5000])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_codes_and_scales_of_blocks(fused: Any, kind: torch.dtype, size: int, noise: int | None) -> None:
    if kind != torch.int8 and noise is not None:
        pytest.skip("Float8 is rounded to the nearest")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        values = drawn(12 * size + size // 2 + 1, size, dtype).to(DEVICE)
        codes, scales = torch.empty_like(values, dtype=kind), torch.zeros(13 + 1, device=DEVICE)
        fused.encode(values, codes, scales, size, noise)
        expected = in_blocks(values, size, kind, noise)
        blocks = expected[1].numel()
        assert not scales[blocks:].any()
        if REAL:
            assert scales[:blocks].equal(expected[1])
        else:  # the host divides, a GPU multiplies by the inverse
            torch.testing.assert_close(scales[:blocks], expected[1], rtol=1.2e-7, atol=0)
        if kind == torch.int8 or REAL:
            assert codes.view(torch.int8).equal(expected[0].view(torch.int8))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of NumPy's, which the interpreter asks
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_block_with_what_is_no_number_has_a_scale_that_is_none(fused: Any, value: float) -> None:
    values = torch.arange(30.0, device=DEVICE)
    values[13] = value
    codes, scales, out = torch.empty(30, dtype=torch.int8, device=DEVICE), torch.empty(3, device=DEVICE), torch.empty(30, device=DEVICE)
    fused.encode(values, codes, scales, 10, None)
    fused.decode(codes, scales, out, 10, add=False)
    assert out[:10].isfinite().all() and out[20:].isfinite().all() and not out[10:20].isfinite().any()


@pytest.mark.parametrize("size", [1, 7, 256, 5000])
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_values_of_blocks(fused: Any, kind: torch.dtype, size: int) -> None:
    codes = torch.linspace(-127, 127, 12 * size + size // 2 + 1, device=DEVICE).to(kind)
    scales = torch.linspace(1e-4, 3, 13, device=DEVICE)
    expected = codes.float() * scales.repeat_interleave(size)[: codes.numel()]
    for dtype in EXACT:
        out = torch.empty_like(codes, dtype=dtype)
        fused.decode(codes, scales, out, size, add=False)
        assert out.equal(expected.to(dtype))
    total = torch.full_like(expected, 0.1)
    fused.decode(codes, scales, total, size, add=True)
    assert total.equal(expected + 0.1)


AT_REST = [NF4(), NF4(double_quant=False), NF4(block_size=128), MXFP4(), Int8(), Int8(block_size=7), Float8(), Float8(block=(9, 5))]


@pytest.mark.parametrize("kind", AT_REST, ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", [(130, 257), (3, 10, 77), (5000,)])
@pytest.mark.parametrize(("start", "stop"), [(0, 0), (1, 1), (4099, 1500)])
def test_values_of_tensors_at_rest(fused: Any, kind: Any, shape: tuple[int, ...], start: int, stop: int) -> None:
    """From the element `start` on, without the last `stop`."""
    quantized, codec = kind.quantize(drawn(math.prod(shape), 1, torch.float32).view(shape).to(DEVICE)), kind.codec(DEVICE)
    assert quantized.codes.dtype == codec.codes
    start, stop = start % quantized.numel, quantized.numel - stop
    for dtype in EXACT if start < stop else ():
        expected, found = (torch.zeros(stop - start, dtype=dtype, device=DEVICE) for _ in range(2))
        codec.decode_in_slices(quantized, start, expected)
        codec.decode_by(fused, quantized, start, found)
        assert found.equal(expected)
