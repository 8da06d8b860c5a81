"""MXFP4: eight magnitudes and a sign, times a power of two for each 32 elements. The format of
gpt-oss (OCP Microscaling, MX v1.0).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .codec import SLICE_NUMEL, BlockCodec, PairTable, Shape, count_below, packed
from .sections import QuantizedTensor

__all__: list[str] = []

BLOCK_NUMEL = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # a scale is stored as its power of two plus this
_NOT_A_NUMBER = 255


class MXFP4Codec(BlockCodec):
    """Codes of four bits, the sign in the highest, and eight bits for the power of two of a
    block.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(BLOCK_NUMEL)
        self._table = PairTable((*MAGNITUDES, *(-value for value in MAGNITUDES)), device, first=0)
        values = torch.tensor(MAGNITUDES)
        borders = (values[1:] + values[:-1]) / 2
        # The middle between two magnitudes is rounded to the even code, which is the upper one of
        # every other pair.
        borders[1::2] = borders[1::2].nextafter(torch.zeros(()))
        self._borders: list[float] = borders.tolist()
        powers = 2.0 ** (torch.arange(256, dtype=torch.float64) - _BIAS)
        powers[_NOT_A_NUMBER] = torch.nan
        self._powers = powers.float().to(device)

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
        self.scaled(
            self._table.read(quantized.codes, start, out.numel()),
            self._powers.index_select(0, scales.int()),
            out,
        )


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
        out = torch.empty(
            quantized.shape if matrix is None else quantized.shape[1:],
            dtype=dtype,
            device=quantized.codes.device,
        )
        step = max(1, SLICE_NUMEL // max(1, columns))
        for number, target in zip(numbers, out.view(len(numbers), columns, rows), strict=True):
            for row in range(0, rows, step):
                part = out.new_empty(min(step, rows - row), columns)
                self.decode(quantized, (number * rows + row) * columns, part.view(-1))
                target[:, row : row + step] = part.mT
        return out
