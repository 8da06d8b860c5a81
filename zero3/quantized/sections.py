"""Where the parts of a quantised tensor lie in its bytes: codes, scales, and the scales' own
scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__: list[str] = []

# every section starts at a multiple of it, so that its bytes can be seen as numbers of any dtype
ALIGNMENT_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Section:
    """One part of a quantised tensor: `numel` numbers of `dtype`, from byte `offset` on."""

    name: str
    dtype: torch.dtype
    numel: int
    offset: int

    @property
    def stop(self) -> int:
        """The byte behind its last one."""
        return self.offset + self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A tensor in a quantised format, as `format.quantize` returns it and `format.dequantize` takes
    it.

    Attributes:
        shape: The shape of the tensor.
        codes: The elements' codes, 1-D, in the order of the flattened tensor: uint8 with two codes
            in a byte (NF4: the first in the high half; MXFP4: in the low half), int8 (Int8), or
            float8_e4m3fn (Float8).
        scales: A scale for each block, 1-D: float32, or uint8 (NF4 with `double_quant`: codes of
            the scales; MXFP4: exponents of two, plus 127).
        scale_scales: With `double_quant`, a float32 for each 256 scales. Otherwise None.
        offset: With `double_quant`, the mean of all scales, a float32 `[1]`. Otherwise None.

    Example::

        quantized = zero3.NF4().quantize(weight)
        print(quantized.codes.nbytes + quantized.scales.nbytes)
    """

    shape: tuple[int, ...]
    codes: Tensor
    scales: Tensor
    scale_scales: Tensor | None = None
    offset: Tensor | None = None

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def sections(self) -> dict[str, Tensor]:
        """Its tensors by name, in the order in which they are stored."""
        named = {
            "codes": self.codes,
            "scales": self.scales,
            "scale_scales": self.scale_scales,
            "offset": self.offset,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def placed(parts: Iterable[tuple[str, torch.dtype, int]]) -> tuple[Section, ...]:
    """Sections one after another, from `(name, dtype, numel)`."""
    sections: list[Section] = []
    for name, dtype, numel in parts:
        sections.append(Section(name, dtype, numel, aligned(sections[-1].stop) if sections else 0))
    return tuple(sections)


def aligned(nbytes: int) -> int:
    """The next position at which a section may start."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def seen_as(raw: Tensor, shape: tuple[int, ...], sections: Iterable[Section]) -> QuantizedTensor:
    """`raw`, the bytes of a quantised tensor, as views of its sections."""
    return QuantizedTensor(
        shape, **{s.name: raw[s.offset : s.stop].view(s.dtype) for s in sections}
    )
