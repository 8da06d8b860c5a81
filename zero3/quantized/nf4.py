"""NF4: sixteen numbers, the quantiles of a normal distribution. Bit for bit what bitsandbytes
stores and reads on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .codec import BlockCodec, PairTable, Shape, count_below, packed
from .kernels import DTYPES as KERNEL_DTYPES
from .kernels import nf4_kernel
from .sections import QuantizedTensor

__all__: list[str] = []

# The numbers of the format (QLoRA, appendix E), in float32.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
ZERO = VALUES.index(0.0)
SMALLEST_SCALE = 1e-38  # blocks of zeros are divided by this one
SCALES_NUMEL = 256  # scales with one common scale, with double quantisation
# with double quantisation, a scale is first rounded to so many equal steps between -1 and 1
_POINTS = 65535


class NF4Codec(BlockCodec):
    """Codes and one float32 scale for each block: its largest absolute value."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        super().__init__(block_size)
        values = torch.tensor(VALUES)
        self._borders: list[float] = ((values[1:] + values[:-1]) / 2).tolist()
        self._table = PairTable(VALUES, device, first=4)
        self._kernel = nf4_kernel(block_size, device, self._decoded)

    def statistics(self, values: Tensor, shape: Shape, start: int) -> Tensor:
        largest = self.blocked(values).abs().amax(1)
        if values.numel() % self.block_size:  # bitsandbytes stores the smallest scale here
            largest[-1:].clamp_(min=SMALLEST_SCALE)
        return largest

    def encode(self, values: Tensor, shape: Shape, start: int, statistics: Tensor) -> Tensor:
        blocks = self.blocked(values)
        scaled = blocks * (1.0 / statistics.clamp(min=SMALLEST_SCALE))[:, None]
        if values.numel() % self.block_size:  # bitsandbytes divides here
            scaled[-1] = blocks[-1] / statistics[-1]
        nearest = count_below(scaled.clamp_(-1, 1), self._borders)
        return packed(nearest.view(-1)[: values.numel()], first=4, filler=ZERO)

    def read_scales(self, quantized: QuantizedTensor, first: int, last: int) -> Tensor:
        """The scales of the blocks `[first, last)`, in float32."""
        return quantized.scales[first:last]

    def decode_units(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        first, numel = start // self.block_size, out.numel()
        scales = self.read_scales(quantized, first, first - (-numel // self.block_size))
        if self._kernel is not None and numel % 2 == 0 and out.dtype in KERNEL_DTYPES:
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
        self._nearest = (
            torch.bucketize(points, (values[1:] + values[:-1]) / 2, out_int32=True)
            .to(torch.uint8)
            .to(device)
        )
        self._dynamic = values.to(device)

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

    def read_scales(self, quantized: QuantizedTensor, first: int, last: int) -> Tensor:
        if quantized.scale_scales is None or quantized.offset is None:
            raise ValueError(
                "the tensor was quantised with double_quant=False: dequantise it with the format "
                "that quantised it"
            )
        group = first // SCALES_NUMEL
        common = (
            quantized.scale_scales[group : -(-last // SCALES_NUMEL), None]
            .expand(-1, SCALES_NUMEL)
            .reshape(-1)
        )
        begin = first - group * SCALES_NUMEL
        values = self._dynamic.index_select(0, quantized.scales[first:last].int())
        return values.mul_(common[begin : begin + last - first]).add_(quantized.offset)


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
