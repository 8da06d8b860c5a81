"""Int8 in blocks, and float8 in tiles of a matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .blocks import FLOAT8_MAX, INT8_MAX
from .codec import BlockCodec, Codec, Shape
from .sections import QuantizedTensor

__all__: list[str] = []


class Int8Codec(BlockCodec):
    """Codes from -127 to 127, times one float32 for each block."""

    def statistics(self, values: Tensor, shape: Shape, start: int) -> Tensor:
        return self.blocked(values).abs().amax(1) / INT8_MAX

    def encode(self, values: Tensor, shape: Shape, start: int, statistics: Tensor) -> Tensor:
        codes = (
            _quotients(self.blocked(values), statistics[:, None])
            .round_()
            .clamp_(-INT8_MAX, INT8_MAX)
            .to(torch.int8)
        )
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

    def __init__(self, height: int, width: int, device: torch.device) -> None:
        self._height = height
        self._width = width
        # faster than a cast on CPU
        self._values = (
            torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)
        )

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
