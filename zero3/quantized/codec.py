"""How a format's numbers are made and read, on one device: blocks of elements, and a scale for each
block.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .sections import QuantizedTensor

__all__: list[str] = []

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

    def slice_numel(self, shape: Shape) -> int:
        """How many elements are decoded at once: whole units."""
        unit = self.unit(shape)
        return max(1, SLICE_NUMEL // unit) * unit

    @abstractmethod
    def decode_units(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        """Writes the elements `[start, start + len(out))` into `out`, 1-D. They are whole units;
        the tensor's last may be short.
        """

    def decode(self, quantized: QuantizedTensor, start: int, out: Tensor) -> None:
        """Writes the elements `[start, start + len(out))` of the flattened tensor into `out`, 1-D,
        of any floating dtype.
        """
        unit, stop = self.unit(quantized.shape), start + out.numel()
        step = self.slice_numel(quantized.shape)
        for low in range(start // unit * unit, stop, step):
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
        return QuantizedTensor(shape, torch.cat(codes), **self.scales(torch.cat(found)))

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
