"""NF4 against bitsandbytes' kernels for the CPU: the same bytes, and the same numbers from them."""

from __future__ import annotations

import pytest
import torch

from zero3 import NF4
from zero3.quantized import codec as codecs
from zero3.quantized.codec import dynamic_values

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: make low-bit")
functional = pytest.importorskip("bitsandbytes.functional")

SHAPES = [(256, 256), (10, 100), (3, 6), (1000,), (33, 128), (2, 7, 66), (64, 16384 // 64 * 3), (300, 70)]


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) * 0.02).to(dtype)


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [64, 256])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nf4_has_the_bytes_and_numbers_of_bitsandbytes(shape: tuple[int, ...], block_size: int, dtype: torch.dtype, double: bool) -> None:
    values, ours = drawn(shape, dtype), NF4(block_size, double)
    codes, state = functional.quantize_4bit(values, blocksize=block_size, quant_type="nf4", compress_statistics=double)
    quantized = ours.quantize(values)
    assert quantized.codes.equal(codes.view(-1))
    assert quantized.scales.equal(state.absmax)
    if double:
        assert quantized.scale_scales is not None
        assert quantized.offset is not None
        assert quantized.scale_scales.equal(state.state2.absmax)
        assert quantized.offset.equal(state.offset.view(1))
    state.shape = torch.Size([values.numel()])  # as one row: bitsandbytes 0.50.2 reads wrong scales where a row is shorter than a block
    assert ours.dequantize(quantized, dtype).equal(functional.dequantize_4bit(codes, state).view(shape))


@pytest.mark.parametrize("values", [torch.zeros(130), torch.ones(1024), torch.full((77,), -3.0)], ids=["zeros", "ones", "short"])
def test_nf4_of_constant_tensors(values: torch.Tensor) -> None:
    """All scales are their mean, so the second level divides zero by zero."""
    codes, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=True)
    quantized = NF4().quantize(values)
    assert quantized.codes.equal(codes.view(-1))
    assert quantized.scales.equal(state.absmax)
    assert NF4().dequantize(quantized, torch.float32).equal(values)


def test_nf4_second_level_at_every_point() -> None:
    """Scales at all points between the two ends, and next to the borders between them."""
    assert dynamic_values().equal(functional.create_dynamic_map())
    points = torch.arange(65536) * 2 / 65535 - 1
    for shift in (0.0, 1e-6, -1e-6, 0.4 / 65535, -0.4 / 65535):
        statistics = (points + shift).clamp(-1, 1)
        statistics[::256], statistics[1::256] = 1, -1  # so that every group's scale is one
        codes = NF4().codec(statistics.device).scales(statistics)
        expected, state = functional.quantize_blockwise(statistics - statistics.mean(), blocksize=256)
        assert codes["scales"].equal(expected)
        assert codes["scale_scales"].equal(state.absmax)


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("block_size", [32, 64, 1024, 4096])
@pytest.mark.parametrize("shape", [*SHAPES, (7, 11, 13), (1500, 1501)], ids=str)
def test_nf4_decoded_by_its_kernel_has_the_bits_of_our_own_code(
    shape: tuple[int, ...], block_size: int, dtype: torch.dtype, double: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, device = NF4(block_size, double), torch.device("cpu")
    quantized, theirs = kind.quantize(drawn(shape, torch.float32)), kind.codec(device)
    monkeypatch.setattr(codecs, "nf4_kernel", lambda *_: None)
    ours = kind.codec(device)
    assert (theirs._kernel is not None) == (block_size <= 1024), "it is used"
    assert ours._kernel is None
    assert theirs.dequantize(quantized, dtype).equal(ours.dequantize(quantized, dtype))
    start, stop = quantized.numel // 3, quantized.numel - 1
    mine, other = torch.empty(2, stop - start, dtype=dtype)
    ours.decode(quantized, start, mine)
    theirs.decode(quantized, start, other)
    assert mine.equal(other)


@pytest.mark.parametrize("shape", [(3, 64, 128), (5, 16, 40), (4, 192, 704)], ids=str)
def test_rows_of_experts_have_the_bytes_of_bitsandbytes(shape: tuple[int, int, int]) -> None:
    """Of the whole parameter, cut at experts. Experts of 11 blocks begin inside of 256 scales with one of their own."""
    values, kind = drawn(shape, torch.float32), NF4()
    codes, state = functional.quantize_4bit(values, blocksize=64, quant_type="nf4", compress_statistics=True)
    rows = kind.rows(shape)
    raw = torch.empty(kind.stored(shape), dtype=torch.uint8)
    rows.store(kind.quantize(values), raw)
    each = rows.seen(raw)
    assert len(each) == shape[0]
    assert torch.cat([row.codes for row in each]).equal(codes.view(-1))
    assert torch.cat([row.scales for row in each]).equal(state.absmax)
    state.shape = torch.Size([values.numel()])
    whole = functional.dequantize_4bit(codes, state).view(shape)
    for row, expected in zip(each, whole, strict=True):
        assert kind.codec(raw.device).dequantize(row, torch.float32)[0].equal(expected)
