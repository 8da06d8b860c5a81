"""Slices of a buffer as they travel: the bytes that the format itself gives, in any pieces, for any length."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from zero3 import NF4, Float8, Int8
from zero3.quantized import wire
from zero3.quantized.blocks import decode_blocks, encode_blocks, uniform
from zero3.quantized.wire import Rows, block_size

KINDS = [Int8(), Int8(block_size=1), Int8(block_size=7), Int8(block_size=10**4), Float8(), Float8(block=(9, 5))]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CPU = torch.device("cpu")


def drawn(numel: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Values over many magnitudes, blocks of zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-4, 3, (numel,), generator=generator)
    values[: numel // 3] = 0
    values[: numel // 5] = -0.0
    return values.to(dtype)


@settings(max_examples=50)
@given(
    st.sampled_from(KINDS), st.lists(st.integers(0, 300), min_size=1, max_size=3), st.integers(0, 99), st.sampled_from(FLOATS), st.data()
)
def test_rows_hold_the_bytes_of_the_format(kind: Any, lengths: list[int], seed: int, dtype: torch.dtype, data: st.DataObject) -> None:
    rows = Rows(kind, lengths)
    raw, work = rows.empty(CPU), rows.work(CPU)
    work.numel = min(work.numel, max(1, 64 // block_size(kind)) * block_size(kind))  # so that several turns are needed
    values = [drawn(length, seed + number, dtype) for number, length in enumerate(lengths)]
    for number, each in enumerate(values):
        cuts = sorted(data.draw(st.lists(st.integers(0, lengths[number]), max_size=4)))
        rows[number].encode(torch.tensor_split(each, cuts), rows.of(raw, number), work)
    for number, (length, each) in enumerate(zip(lengths, values, strict=True)):
        expected, found = kind.quantize(each), kind.seen(rows.of(raw, number), (length,))
        assert found.codes.view(torch.uint8).equal(expected.codes.view(torch.uint8))
        assert found.scales.view(torch.uint8).equal(expected.scales.view(torch.uint8))
        for out in FLOATS:
            decoded = torch.empty(length, dtype=out)
            rows[number].decode(rows.of(raw, number), decoded, work)
            assert decoded.equal(kind.dequantize(expected, out))
        total = torch.ones(length)
        rows[number].decode(rows.of(raw, number), total, work, add=True)
        assert total.equal(1 + kind.dequantize(expected, torch.float32))
    assert rows.nbytes == sum(kind.nbytes((length,)) for length in lengths)
    assert (rows.bounds is None) == (len(set(lengths)) == 1)


def test_what_is_worked_on_at_once_does_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    values = drawn(5000, 0, torch.float32)

    def encoded(kind: Int8) -> Tensor:
        rows = Rows(kind, [5000])
        raw = rows.empty(CPU).zero_()
        rows[0].encode([values], raw, rows.work(CPU), key=12345)
        return raw

    for kind in (Int8(), Int8(stochastic=True)):
        whole = encoded(kind)
        with monkeypatch.context() as patched:
            patched.setattr(wire, "_AT_ONCE_ON_CPU", 512)
            assert encoded(kind).equal(whole)


@settings(max_examples=50)
@given(st.integers(-(2**31), 2**31 - 1), st.integers(0, 10**6), st.integers(1, 50))
def test_random_numbers_are_a_hash_of_32_bits(key: int, start: int, count: int) -> None:
    with np.errstate(over="ignore"):
        x = np.arange(start, start + count).astype(np.uint32) * np.uint32(0x9E3779B9) + np.uint32(key % 2**32)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(2146121005)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(-2073254261 % 2**32)
        x = x ^ (x >> np.uint32(16))
    expected = (x >> np.uint32(9)).astype(np.float64) / 2**23
    found = uniform(start, key, torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.int32))
    assert found.double().tolist() == expected.tolist()


def test_random_numbers_look_uniform_and_independent() -> None:
    count = 1 << 16
    empty = [torch.empty(count, dtype=torch.int32) for _ in range(3)]
    a, b = uniform(0, 1, empty[0], empty[2]).double(), uniform(0, 2, empty[1], empty[2]).double()
    bound = 5 / math.sqrt(count)
    for each in (a, b):
        assert each.min() >= 0 and each.max() < 1
        assert abs(each.mean() - 0.5) < bound
        assert abs(each.var() * 12 - 1) < 2 * bound
        buckets = torch.histc(each, 64, 0, 1)
        assert (buckets - count / 64).abs().max() < 5 * math.sqrt(count / 64)
        assert abs(torch.corrcoef(torch.stack([each[1:], each[:-1]]))[0, 1]) < bound
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < bound


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", [Int8(block_size=4), Float8(block=(1, 4))], ids=str)
def test_a_block_with_a_number_that_is_none_stays_without_numbers(kind: Any, value: float) -> None:
    values = torch.arange(1.0, 13.0)
    values[5] = value
    rows = Rows(kind, [12])
    raw, work, out = rows.empty(CPU), rows.work(CPU), torch.empty(12)
    rows[0].encode([values], raw, work)
    rows[0].decode(raw, out, work)
    assert not out[4:8].isfinite().any()
    assert torch.allclose(torch.cat([out[:4], out[8:]]), torch.cat([values[:4], values[8:]]), rtol=0.07)


def test_only_formats_of_eight_bits_travel() -> None:
    with pytest.raises(TypeError, match="is no format for transfers"):
        block_size(NF4())


class OneByOne:
    """In place of Triton's kernels: each block by itself, with memory of its own."""

    def encode(self, values: Tensor, codes: Tensor, scales: Tensor, size: int, key: int | None) -> None:
        for number, part in enumerate(values.split(size) if len(values) else ()):
            place, work = slice(number * size, number * size + len(part)), torch.empty(len(part) + 1)
            numbers = torch.empty(2, len(part), dtype=torch.int32)
            random = None if key is None else uniform(place.start, key, *numbers)[None]
            encode_blocks(part[None], codes[None, place], scales[number : number + 1], work, random)

    def decode(self, codes: Tensor, scales: Tensor, out: Tensor, size: int, *, add: bool) -> None:
        for number, part in enumerate(out.split(size) if len(out) else ()):
            code = codes[None, number * size : number * size + len(part)]
            decode_blocks(code, scales[number : number + 1], part[None], torch.empty(len(part)), add=add)


@settings(max_examples=30)
@given(
    st.sampled_from([*KINDS, Int8(block_size=4, stochastic=True)]),
    st.integers(0, 300),
    st.lists(st.integers(0, 300), max_size=6),
    st.sampled_from(FLOATS),
)
def test_kernels_make_the_bytes_of_rows(kind: Any, numel: int, cuts: list[int], dtype: torch.dtype) -> None:
    """Whole blocks wherever the pieces of a slice meet."""
    values, made = drawn(numel, 1, dtype), []
    pieces = torch.tensor_split(values, sorted(min(cut, numel) for cut in cuts))
    for kernels in (None, OneByOne()):
        rows = Rows(kind, [numel], 0, kernels)
        raw, work, out, total = rows.empty(CPU).zero_(), rows.work(CPU), torch.empty_like(values), torch.ones(numel)
        rows[0].encode(pieces, raw, work, 99)
        rows[0].decode(raw, out, work)
        rows[0].decode(raw, total, work, add=True)
        made.append((raw, out.view(torch.uint8), total))
    assert all(one.equal(other) for one, other in zip(*made, strict=True))
