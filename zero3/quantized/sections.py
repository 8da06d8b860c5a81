"""Where the parts of a quantised tensor lie in its bytes: codes, scales, and the scales' own
scales.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

__all__: list[str] = []

# every section starts at a multiple of it, so that its bytes can be seen as numbers of any dtype
ALIGNMENT_NBYTES = 64
SCALES_NUMEL = 256  # scales with one common scale, with double quantisation


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
        scales_together: How many scales share one of `scale_scales`. Less than 256 in a few of many
            matrices, which begin inside of the 256.

    Example::

        quantized = zero3.NF4().quantize(weight)
        print(quantized.codes.nbytes + quantized.scales.nbytes)
    """

    shape: tuple[int, ...]
    codes: Tensor
    scales: Tensor
    scale_scales: Tensor | None = None
    offset: Tensor | None = None
    scales_together: int = SCALES_NUMEL

    @property
    def numel(self) -> int:
        """The number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def sections(self) -> dict[str, Tensor]:
        """Its tensors by name, in the order in which they are stored."""
        names = ("codes", "scales", "scale_scales", "offset")
        return {name: found for name in names if (found := getattr(self, name)) is not None}


def placed(parts: Iterable[tuple[str, torch.dtype, int]]) -> tuple[Section, ...]:
    """Sections one after another, from `(name, dtype, numel)`."""
    sections: list[Section] = []
    for name, dtype, numel in parts:
        sections.append(Section(name, dtype, numel, aligned(sections[-1].stop) if sections else 0))
    return tuple(sections)


def aligned(nbytes: int) -> int:
    """The next position at which a section may start."""
    return -(-nbytes // ALIGNMENT_NBYTES) * ALIGNMENT_NBYTES


def seen_as(
    raw: Tensor,
    shape: tuple[int, ...],
    sections: Iterable[Section],
    scales_together: int = SCALES_NUMEL,
) -> QuantizedTensor:
    """`raw`, the bytes of a quantised tensor, as views of its sections."""
    return QuantizedTensor(
        shape,
        **{s.name: raw[s.offset : s.stop].view(s.dtype) for s in sections},
        scales_together=scales_together,
    )


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Where a quantised tensor `[E, ...]` of three dimensions is stored: rows of bytes `[E / per,
    nbytes]`, of `per` matrices each, so that it can be cut between them. A row is what the same
    matrices have in the whole tensor, section by section; a common scale of scales in two rows
    stands in both. Other tensors have one row.
    """

    shape: tuple[int, ...]  # of the matrices in a row
    count: int
    sections: tuple[Section, ...]
    nbytes: int
    scales_together: int
    whole: tuple[Section, ...]  # of the whole tensor, where it is not stored in rows

    @property
    def per(self) -> int:
        return self.shape[0]

    @property
    def whole_nbytes(self) -> int:
        """What the whole tensor takes where it is not stored in rows."""
        return aligned(self.whole[-1].stop)

    def seen(self, raw: Tensor) -> list[QuantizedTensor]:
        """Rows of bytes, `[rows, nbytes]` or the only one, as quantised tensors."""
        rows = raw if raw.dim() == 2 else [raw]
        return [seen_as(row, self.shape, self.sections, self.scales_together) for row in rows]

    def _again(self, name: str) -> int:
        """How often each number of the whole tensor's section stands in rows, at most."""
        more = {"offset": self.count, "scale_scales": SCALES_NUMEL // self.scales_together}
        return more.get(name, 1) if self.count > 1 else 1

    def spread(self, name: str, section: Tensor) -> Tensor:
        """A section of the whole tensor, as rows have it: `[count, n]`."""
        (numel,) = (each.numel for each in self.sections if each.name == name)
        again = section.repeat_interleave(self._again(name))
        return again[: self.count * numel].view(self.count, numel)

    def _overlaps(self, start: int, nbytes: int) -> Iterator[tuple[int, Section, int, int]]:
        """Which sections of rows the bytes `[start, start + nbytes)` are in: from which of them on,
        the section, from which byte of it on (of all rows' together), and how many.
        """
        stop = start + nbytes
        rows = range(start // self.nbytes, -(-stop // self.nbytes)) if nbytes else ()
        for row, section in product(rows, self.sections):
            offset, length = row * self.nbytes + section.offset, section.stop - section.offset
            first, last = max(start, offset), min(stop, offset + length)
            if first < last:
                yield first - start, section, row * length + first - offset, last - first

    def fill(self, start: int, kept: Tensor, read: Callable[[str, int, Tensor], None]) -> None:
        """Writes the bytes from `start` on into `kept`. `read(name, byte, out)` reads bytes of a
        section of the whole tensor.
        """
        kept.zero_()
        for at, section, byte, nbytes in self._overlaps(start, len(kept)):
            again, size = self._again(section.name), section.dtype.itemsize
            if again == 1:
                read(section.name, byte, kept[at : at + nbytes])
                continue
            first, last = byte // size // again, (byte + nbytes - 1) // size // again + 1
            found = torch.empty((last - first) * size, dtype=torch.uint8, device=kept.device)
            read(section.name, first * size, found)
            spread = found.view(-1, size).repeat_interleave(again, 0).view(-1)
            kept[at : at + nbytes] = spread[byte - first * again * size :][:nbytes]

    def as_whole(self, start: int, kept: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The bytes `kept`, from `start` on, as they stand where the whole tensor is not in rows:
        from which byte on, and bytes. What rows have in common is given once.
        """
        offsets = {section.name: section.offset for section in self.whole}
        for at, section, byte, nbytes in self._overlaps(start, len(kept)):
            values, again, size = kept[at : at + nbytes], self._again(section.name), 1
            if again > 1:
                size = section.dtype.itemsize
                places = torch.arange(byte, byte + nbytes, device=kept.device)
                ours = (places // size % again == 0).nonzero().view(-1)
                if not len(ours):
                    continue
                values, byte = values[ours], byte + int(ours[0])
            yield offsets[section.name] + byte // size // again * size + byte % size, values

    def store(self, quantized: QuantizedTensor, raw: Tensor) -> None:
        """Copies a whole quantised tensor into its bytes. What lies between sections is 0."""
        raw.zero_()
        rows = self.seen(raw)
        for name, section in quantized.sections.items():
            for row, values in zip(rows, self.spread(name, section), strict=True):
                row.sections[name].copy_(values)
