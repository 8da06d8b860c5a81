"""How formats' numbers are made and read, on one device: blocks of elements, and a scale for each
block. First what all formats share, then Int8, Float8, NF4 and MXFP4.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .blocks import FLOAT8_MAX, INT8_MAX
from .kernels import FourBits, Kernels, Tiles, kernels_on
from .sections import SCALES_NUMEL, QuantizedTensor

__all__: list[str] = []

_log = logging.getLogger("zero3")

# elements that are worked on at once, so that intermediate results take little memory
SLICE_NUMEL = 2**20

Shape = tuple[int, ...]


class Codec(ABC):
    """A format on one device, with its tables.

    A block does not depend on who quantises it: a range of a tensor that begins and ends between
    blocks has the codes, and the blocks' statistics, that the same elements have in the whole
    tensor. `scales` alone looks at the statistics of all blocks.
    """

    def turns(self, shape: Shape) -> bool:
        """Whether a tensor of this shape is stored with its last two dimensions exchanged.

        Then ranges of elements, here, are ranges of what is stored.
        """
        return False

    @abstractmethod
    def widened(self, shape: Shape, start: int, stop: int) -> tuple[int, int]:
        """The shortest range of whole blocks around the elements `[start, stop)` of the flattened
        tensor.
        """

    @abstractmethod
    def blocks_before(self, shape: Shape, start: int) -> int:
        """The place of the first block's statistic among all statistics, if a range of whole blocks
        begins at element `start`.
        """

    @abstractmethod
    def statistics(self, values: Tensor, shape: Shape, start: int) -> Tensor:
        """What codes depend on, besides values: one number for each block, 0 or more.

        If zeros stand for some of the values, the numbers are those of the others. So the numbers
        of a block are the largest of its parts' numbers.

        Args:
            values: The elements `[start, start + len(values))` of a flattened tensor, 1-D, of any
                floating dtype. They are whole blocks.
            shape: The shape of the whole tensor.
            start: The place of the first of them in it.

        Returns:
            float32 and 1-D.
        """

    @abstractmethod
    def encode(self, values: Tensor, shape: Shape, start: int, statistics: Tensor) -> Tensor:
        """Returns the codes of the elements `[start, start + len(values))` as they are stored, 1-D,
        from their blocks' `statistics`.
        """

    def scales(self, statistics: Tensor) -> dict[str, Tensor]:
        """The sections behind the codes, from the statistics of all blocks of the tensor."""
        return {"scales": statistics}

    @abstractmethod
    def unit(self, shape: Shape) -> int:
        """What can be decoded by itself: so many elements, from a multiple of this number on."""

    @abstractmethod
    def decode_units(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        """Writes the elements `[start, start + len(out))` into `out`, 1-D. They are whole units;
        the tensor's last may be short.
        """

    _chosen: Callable[[range], Iterable[int]] = staticmethod(iter)
    codes = torch.uint8  # their dtype
    _kernels: Kernels | None = None

    @abstractmethod
    def decode_by(
        self, kernels: Kernels, quantized: QuantizedTensor, start: int, out: Tensor
    ) -> None:
        """Does what `decode` does, in one kernel."""

    def use(self, kernels: Kernels) -> None:
        """From now on `decode` takes them."""
        self._kernels = kernels

    def use_kernels_on(self, device: torch.device, what: str) -> None:
        """From now on `decode` takes those for `device`, if there are some. `what`: its format."""
        self._kernels = kernels_on(device, what, self.codes, partial(self._as_in_slices, device))

    def _as_in_slices(self, device: torch.device, kernels: Kernels) -> bool:
        """Compares what they make of values of many magnitudes, from an odd place on too, and with
        short blocks at the ends. (Triton compiles for multiples of 16 apart.)
        """
        return all(
            self._same(kernels, torch.linspace(-4, 4, rows * columns, device=device), columns)
            for rows, columns in ((175, 187), (176, 192))
        )

    def _same(self, kernels: Kernels, values: Tensor, columns: int) -> bool:
        quantized = self.quantize(values.pow(7).view(-1, columns))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for start in (0, 4099):
                found = torch.zeros_like(values[start:], dtype=dtype)
                expected = torch.zeros_like(found)
                self.decode_by(kernels, quantized, start, found)
                self.decode_in_slices(quantized, start, expected)
                if not found.equal(expected):
                    return False
        return True

    def choose_slices(self, chosen: Callable[[range], Iterable[int]]) -> None:
        """From now on `decode` decodes those slices alone that `chosen` gives of the places where
        they begin. A plan leaves out what is alike.
        """
        self._chosen = chosen

    def decode(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        """Writes the elements `[start, start + len(out))` of the flattened tensor into `out`, 1-D,
        of any floating dtype.
        """
        if self._kernels is None:
            self.decode_in_slices(quantized, start, out)
        else:
            self.decode_by(self._kernels, quantized, start, out)

    def decode_in_slices(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        """Does what `decode` does, by torch's operations."""
        unit, stop = self.unit(quantized.shape), start + out.numel()
        step = max(1, SLICE_NUMEL // unit) * unit
        for low in self._chosen(range(start // unit * unit, stop, step)):
            high = min(low + step, -(-stop // unit) * unit, quantized.numel)
            if start <= low and high <= stop:
                self.decode_units(quantized, low, out[low - start : high - start])
            else:
                part = out.new_empty(high - low)
                self.decode_units(quantized, low, part)
                first, last = max(low, start), min(high, stop)
                out[first - start : last - start].copy_(part[first - low : last - low])

    def quantize(self, tensor: Tensor) -> QuantizedTensor:
        """Returns `tensor` in this format."""
        flat, shape = tensor.detach().reshape(-1), tuple(tensor.shape)
        parts: list[tuple[Tensor, Tensor]] = []
        low = 0
        while low < flat.numel() or not parts:  # an empty tensor has one empty part
            high = self.widened(shape, low, min(low + SLICE_NUMEL, flat.numel()))[1]
            statistics = self.statistics(flat[low:high], shape, low)
            parts.append((self.encode(flat[low:high], shape, low, statistics), statistics))
            low = high
        codes, found = zip(*parts, strict=True)
        sections: dict[str, Any] = {"codes": torch.cat(codes), **self.scales(torch.cat(found))}
        return QuantizedTensor(shape, **sections)

    def dequantize(
        self, quantized: QuantizedTensor, dtype: torch.dtype, matrix: int | None = None
    ) -> Tensor:
        """Returns the tensor that `quantized` stands for, contiguous; or one matrix of several, and
        then nothing else is decoded.
        """
        shape = quantized.shape if matrix is None else quantized.shape[1:]
        out = torch.empty(shape, dtype=dtype, device=quantized.codes.device)
        self.decode(quantized, (matrix or 0) * out.numel(), out.view(-1))
        return out


class BlockCodec(Codec):
    """Blocks of `block_size` elements one after another in the flattened tensor; the last one may
    be short.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def widened(self, shape: Shape, start: int, stop: int) -> tuple[int, int]:
        size = self.block_size
        return start // size * size, min(-(-stop // size) * size, math.prod(shape))

    def blocks_before(self, shape: Shape, start: int) -> int:
        return start // self.block_size

    def unit(self, shape: Shape) -> int:
        return self.block_size

    def blocked(self, values: Tensor) -> Tensor:
        """`values` in float32, `[blocks, block_size]`, with zeros at the end of a short block."""
        short = -values.numel() % self.block_size
        return (pad(values.float(), (0, short)) if short else values.float()).view(
            -1, self.block_size
        )

    def scaled(self, values: Tensor, scales: Tensor, out: Tensor) -> None:
        """Writes `values` times the scales of their blocks into `out`. The products are float32,
        and rounded once.
        """
        whole = out.numel() // self.block_size
        border = whole * self.block_size
        shape = (whole, self.block_size)
        torch.mul(values[:border].view(shape), scales[:whole, None], out=out[:border].view(shape))
        if border < out.numel():
            torch.mul(values[border:], scales[-1], out=out[border:])


def count_below(values: Tensor, borders: Sequence[float]) -> Tensor:
    """How many of the borders are below each value, uint8. Unlike `torch.bucketize` it is fast for
    a few borders, and vectorised.
    """
    count = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for border in borders:
        count.add_((values > border).view(torch.uint8))
    return count


def packed(codes: Tensor, *, first: int, filler: int = 0) -> Tensor:
    """Two codes in a byte. The first of both is shifted by `first` bits, 4 or 0. `filler` stands
    beside an odd last one.
    """
    if codes.numel() % 2:
        codes = pad(codes, (0, 1), value=filler)
    pairs = codes.view(-1, 2)
    return (pairs[:, 0] << first) | (pairs[:, 1] << (4 - first))


class PairTable:
    """The numbers that two codes in a byte stand for. Both are looked up at once: their bits, as
    one integer of 64.
    """

    def __init__(self, values: Sequence[float], device: torch.device, *, first: int) -> None:
        table, byte = torch.tensor(values), torch.arange(256)
        pairs = torch.stack([table[(byte >> first) & 15], table[(byte >> (4 - first)) & 15]], 1)
        self._pairs = pairs.view(torch.int64).view(-1).to(device)

    def read(self, codes: Tensor, start: int, numel: int) -> Tensor:
        """The numbers of the elements `[start, start + numel)`, float32, 1-D. `start` is even."""
        pairs = self._pairs.index_select(0, codes[start // 2 : (start + numel + 1) // 2].int())
        return pairs.view(torch.float32)[:numel]


# -- Int8 in blocks, and Float8 in tiles of a matrix


class Int8Codec(BlockCodec):
    """Codes from -127 to 127, times one float32 for each block."""

    codes = torch.int8

    def decode_by(
        self, kernels: Kernels, quantized: QuantizedTensor, start: int, out: Tensor
    ) -> None:
        kernels.decode_tiles(Tiles(1, self.block_size, 1, self.block_size), quantized, start, out)

    def statistics(self, values: Tensor, shape: Shape, start: int) -> Tensor:
        return self.blocked(values).abs().amax(1) / INT8_MAX

    def encode(self, values: Tensor, shape: Shape, start: int, statistics: Tensor) -> Tensor:
        quotients = _quotients(self.blocked(values), statistics[:, None]).round_()
        codes = quotients.clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
        return codes.view(-1)[: values.numel()]

    def decode_units(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        first = start // self.block_size
        scales = quantized.scales[first : first - (-out.numel() // self.block_size)]
        self.scaled(quantized.codes[start : start + out.numel()].float(), scales, out)


class Float8Codec(Codec):
    """float8_e4m3fn, times one float32 for each tile of `height` rows and `width` columns of a
    matrix.

    The tensor's last two dimensions are a matrix's. Tiles at its lower and its right edge may be
    smaller. The tiles side by side are a band, so whole blocks are whole bands.
    """

    codes = torch.float8_e4m3fn

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self._height = height
        self._width = width
        # faster than a cast on CPU
        self._values = (
            torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)
        )

    def decode_by(
        self, kernels: Kernels, quantized: QuantizedTensor, start: int, out: Tensor
    ) -> None:
        rows, columns = (max(1, size) for size in _matrix(quantized.shape))
        kernels.decode_tiles(Tiles(rows, columns, self._height, self._width), quantized, start, out)

    def widened(self, shape: Shape, start: int, stop: int) -> tuple[int, int]:
        rows, columns = _matrix(shape)
        if not rows * columns:
            return 0, 0
        first, last = start // columns, -(-stop // columns)
        # rows of the same matrix before the first, and up to the last
        above, end = first % rows, (last - 1) % rows + 1
        last += min(-(-end // self._height) * self._height, rows) - end
        return (first - above % self._height) * columns, last * columns

    def blocks_before(self, shape: Shape, start: int) -> int:
        rows, columns = _matrix(shape)
        bands: int = self._band(start // max(columns, 1), rows)
        return bands * -(-columns // self._width)

    def _band(self, row: Any, rows: int) -> Any:
        """The number of the band in which a row, of all matrices' rows, lies: for an integer, or a
        tensor of them.
        """
        return row // max(rows, 1) * -(-rows // self._height) + row % max(rows, 1) // self._height

    def _bands(self, shape: Shape, start: int, like: Tensor) -> Tensor:
        """The bands of the rows that `like`, whole rows from element `start` on, holds."""
        rows, columns = _matrix(shape)
        first, count = (start // columns, like.numel() // columns) if columns else (0, 0)
        return self._band(torch.arange(first, first + count, device=like.device), rows)  # type: ignore[no-any-return]

    def statistics(self, values: Tensor, shape: Shape, start: int) -> Tensor:
        if not values.numel():
            return values.float()
        columns = _matrix(shape)[1]
        tiles = -(-columns // self._width)
        bands = self._bands(shape, start, values)
        bands -= bands[0].clone()
        widest = (
            pad(values.float().view(-1, columns).abs(), (0, -columns % self._width))
            .view(-1, tiles, self._width)
            .amax(2)
        )
        largest = widest.new_zeros(int(bands[-1]) + 1, tiles).scatter_reduce_(
            0, bands[:, None].expand_as(widest), widest, "amax"
        )
        return largest.view(-1) / FLOAT8_MAX

    def encode(self, values: Tensor, shape: Shape, start: int, statistics: Tensor) -> Tensor:
        if not values.numel():
            return values.to(torch.float8_e4m3fn)
        columns = _matrix(shape)[1]
        bands = self._bands(shape, start, values)
        scales = statistics.view(-1, -(-columns // self._width))[bands - bands[0]]
        quotients = _quotients(
            values.float().view(-1, columns), self._spread(scales, columns)
        ).clamp_(-FLOAT8_MAX, FLOAT8_MAX)
        return quotients.to(torch.float8_e4m3fn).view(-1)

    def _spread(self, scales: Tensor, columns: int) -> Tensor:
        """`scales` `[rows, tiles]`, one for each column."""
        return scales.repeat_interleave(self._width, 1)[:, :columns]

    def unit(self, shape: Shape) -> int:
        return max(_matrix(shape)[1], 1)

    def decode_units(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        columns = _matrix(quantized.shape)[1]
        scales = quantized.scales.view(-1, -(-columns // self._width))
        codes = quantized.codes[start : start + out.numel()].view(torch.uint8)
        values = self._values.index_select(0, codes.int()).view(-1, columns)
        spread = self._spread(
            scales.index_select(0, self._bands(quantized.shape, start, out)), columns
        )
        torch.mul(values, spread, out=out.view(-1, columns))


def _quotients(values: Tensor, scales: Tensor) -> Tensor:
    """`values / scales`. Where a scale is 0, values are too small for any code but 0, and stay as
    they are.
    """
    return values / torch.where(scales != 0, scales, 1)


def _matrix(shape: Shape) -> tuple[int, int]:
    """The rows and columns of the matrices that a tensor of this shape holds one after another."""
    return (1, 1, *shape)[-2], (1, *shape)[-1]


# -- NF4: sixteen numbers, the quantiles of a normal distribution. Bit for bit what bitsandbytes
# stores and reads on the CPU. Its kernel is used where it is installed and has the bits of ours.

# The numbers of the format (QLoRA, appendix E), in float32.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_NF4_ZERO = NF4_VALUES.index(0.0)
_SMALLEST_SCALE = 1e-38  # blocks of zeros are divided by this one
# with double quantisation, a scale is first rounded to so many equal steps between -1 and 1
_POINTS = 65535
# (codes, the blocks' scales, dtype) -> values, 1-D
_Kernel = Callable[[Tensor, Tensor, torch.dtype], Tensor]
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of longer blocks, bitsandbytes' kernel for the CPU is not exact, and torch.compile takes its place
_KERNEL_LARGEST = 1024


class NF4Codec(BlockCodec):
    """Codes and one float32 scale for each block: its largest absolute value."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        super().__init__(block_size)
        values = torch.tensor(NF4_VALUES)
        self._borders: list[float] = ((values[1:] + values[:-1]) / 2).tolist()
        self._table = PairTable(NF4_VALUES, device, first=4)
        self._pairs = FourBits(values.to(device), 4, block_size, None)
        self._kernel = nf4_kernel(block_size, device, self._decoded)

    def decode_by(
        self, kernels: Kernels, quantized: QuantizedTensor, start: int, out: Tensor
    ) -> None:
        kernels.decode_pairs(self._pairs, quantized, start, out)

    def statistics(self, values: Tensor, shape: Shape, start: int) -> Tensor:
        largest = self.blocked(values).abs().amax(1)
        if values.numel() % self.block_size:  # bitsandbytes stores the smallest scale here
            largest[-1:].clamp_(min=_SMALLEST_SCALE)
        return largest

    def encode(self, values: Tensor, shape: Shape, start: int, statistics: Tensor) -> Tensor:
        blocks = self.blocked(values)
        scaled = blocks * (1.0 / statistics.clamp(min=_SMALLEST_SCALE))[:, None]
        if values.numel() % self.block_size:  # bitsandbytes divides here
            scaled[-1] = blocks[-1] / statistics[-1]
        nearest = count_below(scaled.clamp_(-1, 1), self._borders)
        return packed(nearest.view(-1)[: values.numel()], first=4, filler=_NF4_ZERO)

    def read_scales(self, quantized: QuantizedTensor, first: int, last: int) -> Tensor:
        """The scales of the blocks `[first, last)`, in float32."""
        return quantized.scales[first:last]

    def decode_units(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        first, numel = start // self.block_size, out.numel()
        scales = self.read_scales(quantized, first, first - (-numel // self.block_size))
        if self._kernel is not None and numel % 2 == 0 and out.dtype in _KERNEL_DTYPES:
            out.copy_(
                self._kernel(quantized.codes[start // 2 : (start + numel) // 2], scales, out.dtype)
            )
        else:
            self.scaled(self._table.read(quantized.codes, start, numel), scales, out)

    def _decoded(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(2 * codes.numel(), dtype=dtype, device=codes.device)
        self.scaled(self._table.read(codes, 0, out.numel()), scales, out)
        return out


class DoubleNF4Codec(NF4Codec):
    """The scales, less their mean, are quantised too: eight bits each, and a float32 for each 256
    of them.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        super().__init__(block_size, device)
        values = dynamic_values()
        # A scale is first rounded to one of many points, so that what is nearest to it is looked up
        # and not searched for.
        points = torch.arange(_POINTS + 1) * 2 / _POINTS - 1
        nearest = torch.bucketize(points, (values[1:] + values[:-1]) / 2, out_int32=True)
        self._nearest = nearest.to(torch.uint8).to(device)
        self._dynamic = values.to(device)
        self._pairs = self._pairs._replace(scales=self._dynamic)

    def scales(self, statistics: Tensor) -> dict[str, Tensor]:
        offset = statistics.mean() if statistics.numel() else statistics.new_zeros(())
        centred = statistics - offset
        blocks = pad(centred, (0, -centred.numel() % SCALES_NUMEL)).view(-1, SCALES_NUMEL)
        largest = blocks.abs().amax(1)
        steps = (((blocks * (1 / largest)[:, None]).clamp(-1, 1) + 1) * 0.5 * _POINTS + 0.5).int()
        codes = self._nearest.index_select(0, steps.view(-1).clamp(0, _POINTS)).view_as(blocks)
        # where all scales are the mean, the quotient is not a number
        codes = torch.where(largest[:, None] > 0, codes, 0)
        return {
            "scales": codes.view(-1)[: centred.numel()],
            "scale_scales": largest,
            "offset": offset.view(1),
        }

    def decode(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        self._common(quantized)
        super().decode(quantized, start, out)

    def read_scales(self, quantized: QuantizedTensor, first: int, last: int) -> Tensor:
        scales, offset = self._common(quantized)
        size = quantized.scales_together
        group = first // size
        common = scales[group : -(-last // size), None].expand(-1, size).reshape(-1)
        begin = first - group * size
        values = self._dynamic.index_select(0, quantized.scales[first:last].int())
        return values.mul_(common[begin : begin + last - first]).add_(offset)

    def _common(self, quantized: QuantizedTensor) -> tuple[Tensor, Tensor]:
        """The scales of the scales, and their offset."""
        if quantized.scale_scales is None or quantized.offset is None:
            raise ValueError(
                "the tensor was quantised with double_quant=False: dequantise it with the format "
                "that quantised it"
            )
        return quantized.scale_scales, quantized.offset


def dynamic_values() -> Tensor:
    """The 256 numbers of bitsandbytes' dynamic format, rising, in float32.

    In each power of ten from 1e-6 to 1, on both sides of 0, stand twice as many numbers as in the
    one below, at the middles of equal steps from a tenth of it to all of it. 0 and 1 stand for
    themselves.
    """
    found = [0.0, 1.0]
    for power in range(7):
        steps = torch.linspace(0.1, 1, 2**power + 1, dtype=torch.float32)
        middles = (steps[:-1] + steps[1:]) / 2
        found += (10 ** (power - 6) * middles).tolist() + (-(10 ** (power - 6)) * middles).tolist()
    return torch.tensor(sorted(found))


def nf4_kernel(block_size: int, device: torch.device, ours: _Kernel) -> _Kernel | None:
    """bitsandbytes' kernel on this device. None: it is not installed, has none for the device, or
    not the bits of `ours`.
    """
    present = device.type == "cpu" or (device.type == "cuda" and torch.version.cuda is not None)
    if not present or block_size > _KERNEL_LARGEST or find_spec("bitsandbytes") is None:
        return None
    try:
        import_module("bitsandbytes")
        decode = torch.ops.bitsandbytes.dequantize_4bit.default
    except Exception as reason:  # of any kind: it looks for libraries of the system
        _log.warning("NF4 is decoded without bitsandbytes, which can't be imported: %s", reason)
        return None

    def theirs(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        # the CPU's is [1, n]
        values: Tensor = decode(codes, scales, block_size, "nf4", [2 * codes.numel()], dtype).view(
            -1
        )
        return values

    return theirs if _alike(ours, theirs, block_size, device) else None


def _alike(ours: _Kernel, theirs: _Kernel, block_size: int, device: torch.device) -> bool:
    """Compares them on all pairs of codes, with blocks of several scales and a last one that is
    short.
    """
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(block_size // 64 + 2)[
        : -block_size // 4
    ]
    scales = torch.arange(1, -(-2 * codes.numel() // block_size) + 1, device=device) / 1000
    try:
        return all(
            ours(codes, scales, dtype).equal(theirs(codes, scales, dtype))
            for dtype in _KERNEL_DTYPES
        )
    except RuntimeError:  # it has no kernel for this device
        return False


# -- MXFP4: eight magnitudes and a sign, times a power of two for each 32 elements. The format of
# gpt-oss (OCP Microscaling, MX v1.0).

MXFP4_BLOCK_NUMEL = 32
MXFP4_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # a scale is stored as its power of two plus this
_NOT_A_NUMBER = 255


class MXFP4Codec(BlockCodec):
    """Codes of four bits, the sign in the highest, and eight bits for the power of two of a
    block.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(MXFP4_BLOCK_NUMEL)
        signed = (*MXFP4_MAGNITUDES, *(-value for value in MXFP4_MAGNITUDES))
        self._table = PairTable(signed, device, first=0)
        values = torch.tensor(MXFP4_MAGNITUDES)
        borders = (values[1:] + values[:-1]) / 2
        # The middle between two magnitudes is rounded to the even code, which is the upper one of
        # every other pair.
        borders[1::2] = borders[1::2].nextafter(torch.zeros(()))
        self._borders: list[float] = borders.tolist()
        powers = 2.0 ** (torch.arange(256, dtype=torch.float64) - _BIAS)
        powers[_NOT_A_NUMBER] = torch.nan
        self._powers = powers.float().to(device)
        self._pairs = FourBits(
            torch.tensor(signed, device=device), 0, MXFP4_BLOCK_NUMEL, self._powers
        )

    def decode_by(
        self, kernels: Kernels, quantized: QuantizedTensor, start: int, out: Tensor
    ) -> None:
        kernels.decode_pairs(self._pairs, quantized, start, out)

    def statistics(self, values: Tensor, shape: Shape, start: int) -> Tensor:
        largest = self.blocked(values).abs().amax(1)
        # frexp: largest = m * 2 ** e with m from 0.5 to 1. So divided by 2 ** (e - 3) it lies
        # between 4 and 8, where 6 is the end.
        exponents = torch.where(largest > 0, largest.frexp().exponent - 3 + _BIAS, 0).clamp(
            0, _NOT_A_NUMBER - 1
        )
        return torch.where(largest.isfinite(), exponents, _NOT_A_NUMBER).float()

    def encode(self, values: Tensor, shape: Shape, start: int, statistics: Tensor) -> Tensor:
        scaled = self.blocked(values) / self._powers.index_select(0, statistics.int())[:, None]
        codes = count_below(scaled.abs(), self._borders) | (scaled.signbit().view(torch.uint8) << 3)
        return packed(codes.view(-1)[: values.numel()], first=0)

    def scales(self, statistics: Tensor) -> dict[str, Tensor]:
        return {"scales": statistics.to(torch.uint8)}

    def decode_units(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        first = start // self.block_size
        scales = quantized.scales[first : first - (-out.numel() // self.block_size)]
        values = self._table.read(quantized.codes, start, out.numel())
        self.scaled(values, self._powers.index_select(0, scales.int()), out)


class TransposedMXFP4Codec(MXFP4Codec):
    """Tensors of three dimensions are stored with the last two exchanged, as gpt-oss has its
    experts; all others as they are.
    """

    def turns(self, shape: Shape) -> bool:
        return len(shape) == 3

    def quantize(self, tensor: Tensor) -> QuantizedTensor:
        shape = tuple(tensor.shape)
        return replace(super().quantize(tensor.mT if self.turns(shape) else tensor), shape=shape)

    def dequantize(
        self, quantized: QuantizedTensor, dtype: torch.dtype, matrix: int | None = None
    ) -> Tensor:
        if not self.turns(quantized.shape):
            return super().dequantize(quantized, dtype, matrix)
        count, columns, rows = quantized.shape  # of what is stored
        numbers = range(count) if matrix is None else (matrix,)
        shape = quantized.shape if matrix is None else quantized.shape[1:]
        out = torch.empty(shape, dtype=dtype, device=quantized.codes.device)
        step = max(1, SLICE_NUMEL // max(1, columns))
        for number, target in zip(numbers, out.view(len(numbers), columns, rows), strict=True):
            for row in range(0, rows, step):
                part = out.new_empty(min(step, rows - row), columns)
                self.decode(quantized, (number * rows + row) * columns, part.view(-1))
                target[:, row : row + step] = part.mT
        return out
