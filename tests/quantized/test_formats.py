"""What a tensor becomes in each format: by naive arithmetic, and independent of who quantises which part of it."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from zero3 import MXFP4, NF4, Float8, Int8
from zero3.quantized.codec import MXFP4_MAGNITUDES, NF4_VALUES, SLICE_NUMEL, Codec
from zero3.quantized.formats import Format
from zero3.quantized.sections import ALIGNMENT_NBYTES, QuantizedTensor

FORMATS = [NF4(), NF4(double_quant=False), NF4(block_size=32), Int8(), Int8(block_size=7), Float8(), Float8(block=(3, 5)), MXFP4()]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]

shapes = st.sampled_from([(), (0,), (1,), (7,), (3, 5), (1000,), (64, 64), (10, 100), (4, 7, 9), (130, 140), (3, 70, 33), (0, 4), (4, 0)])
formats = st.sampled_from(FORMATS)
seeds = st.integers(0, 2**16)


def drawn(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values with a few zeros, and a large one."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
    values[values.abs() < 0.002] = 0
    values.view(-1)[:1] *= 7
    return values.to(dtype)


def encoded(codec: Codec, values: Tensor, shape: tuple[int, ...], start: int) -> tuple[Tensor, Tensor]:
    statistics = codec.statistics(values, shape, start)
    return codec.encode(values, shape, start, statistics), statistics


def store(quantized: QuantizedTensor, place: QuantizedTensor) -> None:
    for name, section in place.sections.items():
        section.copy_(quantized.sections[name])


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    found, expected = a.sections, b.sections
    return found.keys() == expected.keys() and all(
        found[name].dtype == expected[name].dtype and found[name].view(torch.uint8).equal(expected[name].view(torch.uint8))
        for name in found
    )


@given(formats, shapes, seeds, st.sampled_from(FLOATS), st.data())
def test_quantize_a_range_alone_gives_what_the_whole_tensor_has_there(
    kind: Format, shape: tuple[int, ...], seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    """So the bytes don't depend on how many ranks quantise a tensor, and on where it is cut."""
    values, codec = drawn(shape, seed, dtype), kind.codec(torch.device("cpu"))
    cuts = sorted(data.draw(st.lists(st.integers(0, values.numel()), max_size=3)))
    borders = [0, *(codec.widened(shape, 0, cut)[1] for cut in cuts), values.numel()]
    parts = [(start, encoded(codec, values.view(-1)[start:stop], shape, start)) for start, stop in pairwise(borders)]
    whole = kind.quantize(values)
    codes = torch.cat([codes for _, (codes, _) in parts])
    statistics = torch.cat([found for _, (_, found) in parts])
    assert same(QuantizedTensor(shape, codes, **codec.scales(statistics)), whole)
    for (start, (_, found)), stop in zip(parts, borders[1:], strict=True):
        if start < stop:
            first = codec.blocks_before(shape, start)
            assert found.equal(statistics[first : first + found.numel()])


@given(formats, shapes, seeds, st.data())
def test_widened_ranges_are_the_shortest_of_whole_blocks(kind: Format, shape: tuple[int, ...], seed: int, data: st.DataObject) -> None:
    codec, numel = kind.codec(torch.device("cpu")), math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    low, high = codec.widened(shape, start, stop)
    if start < stop:
        assert 0 <= low <= start <= stop <= high <= numel
        assert codec.widened(shape, low, high) == (low, high)
        values = drawn(shape, seed)
        encoded(codec, values.view(-1)[low:high], shape, low)


@given(formats, shapes, seeds, st.sampled_from(FLOATS), st.data())
def test_dequantize_any_range_alone(kind: Format, shape: tuple[int, ...], seed: int, dtype: torch.dtype, data: st.DataObject) -> None:
    quantized = kind.quantize(drawn(shape, seed))
    whole = kind.dequantize(quantized, dtype)
    start = data.draw(st.integers(0, whole.numel()))
    out = torch.full((data.draw(st.integers(0, whole.numel() - start)),), torch.nan, dtype=dtype)
    kind.codec(torch.device("cpu")).decode(quantized, start, out)
    assert out.equal(whole.view(-1)[start : start + out.numel()])
    assert whole.dtype == dtype
    assert whole.shape == shape
    assert whole.equal(kind.dequantize(quantized, torch.float32).to(dtype)), "rounded once"


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_dequantize_tensors_of_several_slices(kind: Format) -> None:
    """Slices are borders inside, which may not show outside."""
    values = drawn((3, 700, 1001))
    assert values.numel() > 2 * SLICE_NUMEL
    quantized = kind.quantize(values)
    codec = kind.codec(values.device)
    codes, statistics = encoded(codec, values.view(-1), (3, 700, 1001), 0)
    assert same(QuantizedTensor((3, 700, 1001), codes, **codec.scales(statistics)), quantized)
    out = torch.empty(values.numel())
    codec.decode_units(quantized, 0, out)
    assert kind.dequantize(quantized, torch.float32).view(-1).equal(out)


@given(formats, shapes, seeds)
def test_quantized_tensors_are_stored_in_aligned_sections(kind: Format, shape: tuple[int, ...], seed: int) -> None:
    quantized = kind.quantize(drawn(shape, seed))
    assert list(quantized.sections) == [section.name for section in kind.sections(shape)]
    raw = torch.full((kind.nbytes(shape),), 255, dtype=torch.uint8)
    store(quantized, kind.seen(raw.zero_(), shape))
    assert same(kind.seen(raw, shape), quantized)
    assert all(section.offset % ALIGNMENT_NBYTES == 0 for section in kind.sections(shape))
    assert raw.numel() % ALIGNMENT_NBYTES == 0
    assert raw.numel() < sum(tensor.nbytes for tensor in quantized.sections.values()) + len(quantized.sections) * ALIGNMENT_NBYTES


@given(formats, shapes, st.data())
def test_codes_of_a_range_of_bytes(kind: Format, shape: tuple[int, ...], data: st.DataObject) -> None:
    """A rank that holds some of the bytes finds the elements that it has to quantise: those whose codes change with these bytes."""
    rows, raw = kind.rows(shape), torch.zeros(kind.stored(shape), dtype=torch.uint8)
    low = data.draw(st.integers(0, raw.numel()))
    high = data.draw(st.integers(low, raw.numel()))
    rows.store(kind.quantize(torch.ones(shape)), raw)

    def codes() -> torch.Tensor:
        return torch.cat([row.codes.view(torch.uint8) for row in rows.seen(raw)])

    before = codes()
    raw.view(-1)[low:high] ^= 255
    changed = (codes() != before).nonzero().flatten().tolist()
    start, stop = kind.elements_between(shape, low, high)
    per_byte = 1 if kind.sections(shape)[0].dtype != torch.uint8 else 2
    assert {element // per_byte for element in range(start, stop)} == set(changed)


@given(formats, shapes, seeds)
def test_rows_stand_for_what_the_whole_tensor_stands_for(kind: Format, shape: tuple[int, ...], seed: int) -> None:
    quantized, rows = kind.quantize(drawn(shape, seed, torch.float32)), kind.rows(shape)
    raw = torch.empty(kind.stored(shape), dtype=torch.uint8)
    rows.store(quantized, raw)
    codec = kind.codec(raw.device)
    found = torch.cat([codec.dequantize(row, torch.float32).view(-1) for row in rows.seen(raw)])
    assert torch.equal(found, kind.dequantize(quantized, torch.float32).view(-1))
    whole, filled, again = torch.zeros(kind.nbytes(shape), dtype=torch.uint8), torch.empty_like(raw), torch.zeros(kind.nbytes(shape))
    store(quantized, kind.seen(whole, shape))
    offsets = {section.name: section.offset for section in kind.sections(shape)}

    def read(name: str, byte: int, out: Tensor) -> None:
        out.copy_(whole[offsets[name] + byte :][: len(out)])

    cuts = [0, raw.numel() // 3 + 1, raw.numel()] if raw.numel() else []  # anywhere
    for start, stop in pairwise(cuts):
        rows.fill(start, filled.view(-1)[start:stop], read)
        for at, values in rows.as_whole(start, raw.view(-1)[start:stop]):
            again[at : at + len(values)] += values
    assert torch.equal(filled, raw) and torch.equal(again, whole.float())  # nothing twice


@pytest.mark.parametrize(("shape", "together"), [((3, 64, 256), 256), ((3, 64, 264), 8), ((300, 64, 1), 1)])
def test_rows_repeat_scales_that_matrices_share(shape: tuple[int, int, int], together: int) -> None:
    kind, values = NF4(), torch.randn(shape)
    rows = kind.rows(shape)
    assert (rows.count, rows.scales_together) == (shape[0], together)
    raw = torch.empty(kind.stored(shape), dtype=torch.uint8)
    rows.store(kind.quantize(values), raw)
    whole = kind.dequantize(kind.quantize(values), torch.float32)
    for row, matrix in zip(rows.seen(raw), whole, strict=True):
        assert torch.equal(kind.codec(raw.device).dequantize(row, torch.float32)[0], matrix)


@given(st.sampled_from([1, 7, 256]), shapes, seeds, st.sampled_from(FLOATS))
def test_int8_by_the_definition(block_size: int, shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> None:
    values = drawn(shape, seed, dtype)
    quantized = Int8(block_size).quantize(values)
    flat, codes, scales = values.float().view(-1), [], []
    for start in range(0, flat.numel(), block_size):
        block = flat[start : start + block_size]
        scale = block.abs().max() / 127
        scales.append(scale.item())
        codes += [max(-127, min(127, round(value))) for value in (block / scale if scale else torch.zeros_like(block)).tolist()]
    assert quantized.codes.tolist() == codes
    assert quantized.scales.tolist() == scales
    expected = torch.tensor(codes).float() * torch.tensor(scales).repeat_interleave(block_size)[: flat.numel()]
    assert Int8(block_size).dequantize(quantized, dtype).equal(expected.to(dtype).view(shape))


@given(st.sampled_from([(128, 128), (3, 5), (1, 40)]), st.sampled_from([(3, 5), (7, 9), (2, 7, 11), (130, 140), (9,)]), seeds)
def test_float8_by_the_definition(block: tuple[int, int], shape: tuple[int, ...], seed: int) -> None:
    values = drawn(shape, seed)
    quantized = Float8(block).quantize(values)
    matrices = values.view(-1, *(1, *shape)[-2:])
    expected, scales = torch.empty_like(matrices), []
    for number, matrix in enumerate(matrices):
        for top in range(0, matrix.shape[0], block[0]):
            for left in range(0, matrix.shape[1], block[1]):
                tile = (number, slice(top, top + block[0]), slice(left, left + block[1]))
                scale = matrices[tile].abs().max() / 448
                scales.append(scale.item())
                expected[tile] = (matrices[tile] / scale).to(torch.float8_e4m3fn).float() * scale if scale else 0
    assert quantized.scales.tolist() == scales
    assert Float8(block).dequantize(quantized, torch.float32).equal(expected.view(shape))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 1.0, 6.0]), max_size=70))
def test_mxfp4_is_the_nearest_number_of_the_format(values: list[float]) -> None:
    """OCP's Microscaling formats, 6.3: the power of two is that of the largest value, less the largest magnitude's; ties go to even."""
    quantized = MXFP4().quantize(torch.tensor(values))
    got = MXFP4().dequantize(quantized, torch.float32).double().tolist()
    for start in range(0, len(values), 32):
        block = values[start : start + 32]
        largest = max(map(abs, block))
        power = max(-127, math.frexp(largest)[1] - 3) if largest else -127
        assert quantized.scales[start // 32] == power + 127
        for value, found in zip(block, got[start:], strict=False):
            distances = [abs(abs(value) / 2.0**power - magnitude) for magnitude in MXFP4_MAGNITUDES]
            nearest = [number for number, distance in enumerate(distances) if distance == min(distances)]
            even = next((number for number in nearest if number % 2 == 0), nearest[0])
            assert abs(found) == MXFP4_MAGNITUDES[even] * 2.0**power
            assert math.copysign(1, found) == math.copysign(1, value)


@given(st.sampled_from([NF4(double_quant=False), NF4(block_size=32, double_quant=False)]), shapes, seeds)
def test_nf4_is_the_nearest_number_of_the_format(kind: NF4, shape: tuple[int, ...], seed: int) -> None:
    values = drawn(shape, seed)
    found = kind.dequantize(kind.quantize(values), torch.float64).view(-1)
    table = torch.tensor(NF4_VALUES, dtype=torch.float64)
    for start in range(0, values.numel(), kind.block_size):
        block = values.view(-1)[start : start + kind.block_size].double()
        distances = (block[:, None] - table * block.abs().max()).abs()
        chosen = (block - found[start : start + kind.block_size]).abs()
        assert bool((chosen <= distances.amin(1) + 1e-6 * block.abs().max()).all())


# What bitsandbytes 0.50.2 made of `told()` on a CPU: of the stored bytes, and of the numbers that they stand for.
BITSANDBYTES = {
    (torch.float32, False): ("c235d0a54a16a8a8", "f746a1b5b89ff280"),
    (torch.float32, True): ("af6afa5948382514", "b1bbc35539c23268"),
    (torch.bfloat16, False): ("ef710be5aa715a1e", "dfede06c8729d418"),
    (torch.bfloat16, True): ("9913dc8e0bea8784", "ff92321b64b9ff32"),
}


def told() -> Tensor:
    """Numbers whose sums are exact, so that their mean does not depend on a processor's order of additions."""
    return ((torch.arange(512 * 128) * 40503) % 65521 - 32760).float() / 32768


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


@pytest.mark.parametrize(("dtype", "double"), BITSANDBYTES)
def test_nf4_has_the_bytes_that_bitsandbytes_made(dtype: torch.dtype, double: bool) -> None:
    """Without bitsandbytes; `test_bitsandbytes` compares with more of it where it is installed."""
    kind = NF4(double_quant=double)
    quantized = kind.quantize(told().to(dtype))
    assert (digest(*quantized.sections.values()), digest(kind.dequantize(quantized, dtype))) == BITSANDBYTES[dtype, double]


@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_quantize_what_is_not_finite_shows(kind: Format, wrong: float) -> None:
    values = drawn((512,))
    values[3] = wrong
    assert not kind.dequantize(kind.quantize(values), torch.float32).isfinite().all()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: NF4(block_size=48), ValueError, "power of two from 32 to 4096, found 48"),
        (lambda: NF4(block_size=64.0), TypeError, "block_size must be an integer, found 64.0"),
        (lambda: NF4(double_quant=1), TypeError, "double_quant must be True or False, found 1"),
        (lambda: NF4(select="weight"), TypeError, "select must be a function"),
        (lambda: Int8(block_size=0), ValueError, "block_size must be 1 or more, found 0"),
        (lambda: Int8(select=3), TypeError, "select must be a function"),
        (lambda: Float8(block=128), TypeError, r"block must be \(rows, columns\), found 128"),
        (lambda: Float8(block=(0, 1)), ValueError, "block must be 1 or more, found 0"),
        (lambda: Float8(select=3), TypeError, "select must be a function"),
        (lambda: MXFP4(select=3), TypeError, "select must be a function"),
        (lambda: Int8().quantize(torch.ones(3, dtype=torch.int32)), TypeError, r"int8\(256\) quantises floating .*torch.int32"),
        (lambda: Int8().dequantize(NF4().quantize(torch.ones(3)), torch.float32), ValueError, "has the sections"),
        (lambda: NF4().dequantize(NF4(double_quant=False).quantize(torch.ones(3)), torch.float32), ValueError, "has the sections"),
    ],
)  # fmt: skip
def test_quantize_mistakes_have_names(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]
