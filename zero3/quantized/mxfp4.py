"""MXFP4: eight magnitudes and a sign, times a power of two for each 32 elements. The format of gpt-oss (OCP Microscaling, MX v1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

from .codec import BlockCodec, PairTable, Shape, count_below, packed
from .sections import QuantizedTensor

__all__: list[str] = []

BLOCK_NUMEL = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127  # a scale is stored as its power of two plus this
_NOT_A_NUMBER = 255


class MXFP4Codec(BlockCodec):
    """Codes of four bits, the sign in the highest, and eight bits for the power of two of a block."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(BLOCK_NUMEL)
        self._table = PairTable((*MAGNITUDES, *(-value for value in MAGNITUDES)), device, first=0)
        values = torch.tensor(MAGNITUDES)
        borders = (values[1:] + values[:-1]) / 2
        # The middle between two magnitudes is rounded to the even code, which is the upper one of every other pair.
        borders[1::2] = borders[1::2].nextafter(torch.zeros(()))
        self._borders: list[float] = borders.tolist()
        powers = 2.0 ** (torch.arange(256, dtype=torch.float64) - _BIAS)
        powers[_NOT_A_NUMBER] = torch.nan
        self._powers = powers.float().to(device)

    def encode(self, values: Tensor, shape: Shape, start: int) -> tuple[Tensor, Tensor]:
        blocks = self.blocked(values)
        largest = blocks.abs().amax(1)
        # frexp: largest = m * 2 ** e with m from 0.5 to 1. So divided by 2 ** (e - 3) it lies between 4 and 8, where 6 is the end.
        exponents = torch.where(largest > 0, largest.frexp().exponent - 3 + _BIAS, 0).clamp(0, _NOT_A_NUMBER - 1)
        exponents = torch.where(largest.isfinite(), exponents, _NOT_A_NUMBER)
        scaled = blocks / self._powers.index_select(0, exponents)[:, None]
        codes = count_below(scaled.abs(), self._borders) | (scaled.signbit().view(torch.uint8) << 3)
        return packed(codes.view(-1)[: values.numel()], first=0), exponents.float()

    def scales(self, statistics: Tensor) -> dict[str, Tensor]:
        return {"scales": statistics.to(torch.uint8)}

    def decode_units(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        first = start // self.block_size
        scales = quantized.scales[first : first - (-out.numel() // self.block_size)]
        self.scaled(self._table.read(quantized.codes, start, out.numel()), self._powers.index_select(0, scales.int()), out)
