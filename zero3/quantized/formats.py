"""The formats that users choose: NF4, Int8, Float8 and MXFP4."""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .codec import (
    MXFP4_BLOCK_NUMEL,
    Codec,
    DoubleNF4Codec,
    Float8Codec,
    Int8Codec,
    MXFP4Codec,
    NF4Codec,
    Shape,
    TransposedMXFP4Codec,
)
from .sections import SCALES_NUMEL, QuantizedTensor, Section, StoredRows, aligned, placed, seen_as

__all__: list[str] = []

# (name, ParamInfo) -> bool; the policy, which knows ParamInfo, stands a floor higher
Select = Callable[[str, Any], bool]


class Format(ABC):
    """How a tensor is quantised. What it needs on a device is its `codec`."""

    select: Select | None
    _codes_in_byte = 1

    @abstractmethod
    def _name(self) -> str: ...

    @abstractmethod
    def _codec(self, device: torch.device) -> Codec: ...

    @abstractmethod
    def _parts(self, shape: Shape) -> list[tuple[str, torch.dtype, int]]:
        """The sections as (name, dtype, numel)."""

    @abstractmethod
    def _between_blocks(self) -> int:
        """Matrices of so many elements, or of a multiple, hold whole blocks."""

    @property
    def name(self) -> str:
        """What reports call it. The same name means the same bytes."""
        return self._name()

    def codec(self, device: torch.device) -> Codec:
        """The tables and functions of this format on `device`. Making it may wait for the
        device.
        """
        codec = self._codec(device)
        codec.use_kernels_on(device, self.name)
        return codec

    def sections(self, shape: Shape) -> tuple[Section, ...]:
        """Where the parts of a tensor of this shape lie in its bytes."""
        return placed(self._parts(shape))

    def nbytes(self, shape: Shape) -> int:
        """The bytes of a tensor of this shape: a multiple of 64."""
        return aligned(self.sections(shape)[-1].stop)

    def rows(self, shape: Shape) -> StoredRows:
        """Where a tensor of this shape lies in its bytes."""
        in_row: Shape = shape
        count, together = 1, SCALES_NUMEL
        if len(shape) == 3 and (each := math.prod(shape[1:])) and shape[0]:
            size = self._between_blocks()
            rows, more = divmod(shape[0], size // math.gcd(size, each))
            count = 1 if more else rows
            in_row = (shape[0] // count, *shape[1:])
        parts = self._parts(in_row)
        if count > 1:
            scales = parts[1][2]
            together = math.gcd(scales, together)
            parts = [
                (name, dtype, scales // together if name == "scale_scales" else numel)
                for name, dtype, numel in parts
            ]
        sections = placed(parts)
        nbytes, whole = aligned(sections[-1].stop), self.sections(shape)
        return StoredRows(in_row, count, sections, nbytes, together, whole)

    def stored(self, shape: Shape) -> Shape:
        """The shape of the bytes of a tensor of this shape: of `rows`, where it has matrices."""
        rows = self.rows(shape)
        return (rows.count, rows.nbytes) if len(shape) == 3 else (rows.nbytes,)

    def elements_between(self, shape: Shape, low: int, high: int) -> tuple[int, int]:
        """The elements `[start, stop)`, as they are stored, that have codes among the bytes `[low,
        high)` of a tensor of this shape.

        They may be none.
        """
        rows, numel = self.rows(shape), math.prod(shape)
        in_row, codes = numel // rows.count, rows.sections[0].stop

        def before(at: int) -> int:
            row, byte = divmod(max(at, 0), max(1, rows.nbytes))
            return min(row * in_row + min(min(byte, codes) * self._codes_in_byte, in_row), numel)

        return before(low), before(high)

    def seen(self, raw: Tensor, shape: Shape) -> QuantizedTensor:
        """The bytes `raw` `[nbytes]` as a quantised tensor, without a copy."""
        return seen_as(raw, shape, self.sections(shape))

    def quantize(self, tensor: Tensor) -> QuantizedTensor:
        """Quantises a tensor.

        Args:
            tensor: A floating tensor of any shape, on any device.

        Returns:
            Its codes and scales on the same device: sections that are contiguous and 1-D.

        Raises:
            TypeError: `tensor` is no floating tensor.
        """
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{self.name} quantises floating tensors, found {found}")
        return self._codec(tensor.device).quantize(tensor)

    def dequantize(self, quantized: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Computes the tensor that a quantised one stands for.

        Args:
            quantized: What `quantize` of the same format has returned.
            dtype: The floating dtype of the result. Numbers are computed in float32, and rounded
                once.

        Returns:
            A contiguous tensor in the original shape, on the same device.

        Raises:
            ValueError: The sections are not those of this format for this shape.
        """
        expected = [(s.name, s.dtype, s.numel) for s in self.sections(quantized.shape)]
        found = [
            (name, tensor.dtype, tensor.numel()) for name, tensor in quantized.sections.items()
        ]
        if found != expected:
            raise ValueError(
                f"{self.name} of shape {quantized.shape} has the sections {expected}, found {found}"
            )
        return self.codec(quantized.codes.device).dequantize(quantized, dtype)


@dataclass(frozen=True)
class NF4(Format):
    """Four bits for each element: one of 16 quantiles of a normal distribution, times the largest
    absolute value of its block (QLoRA).

    Codes and scales are those of bitsandbytes on a CPU, to the bit. With `double_quant` an element
    takes 4.127 bits, without it 4.5.

    Attributes:
        block_size: The elements of a block, a power of two from 32 to 4096.
        double_quant: The blocks' scales are quantised too, less their mean: to eight bits, with one
            float32 for each 256 of them.
        select: A function `(name, ParamInfo) -> bool` that says which parameters a policy
            quantises. None: the weights of frozen linear layers but for the output embeddings', and
            frozen experts that are one 3-D parameter (`[num_experts, ...]`).

    Raises:
        ValueError: `block_size` is not allowed.
        TypeError: An attribute has the wrong type.

    Example::

        policy = zero3.ShardingPolicy(quantize=zero3.NF4(), param_dtype=torch.bfloat16)
        quantized = zero3.NF4().quantize(weight)
    """

    block_size: int = 64
    double_quant: bool = True
    select: Select | None = None

    _codes_in_byte = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", _size("block_size", self.block_size))
        if not 32 <= self.block_size <= 4096 or self.block_size & (self.block_size - 1):
            raise ValueError(
                f"block_size must be a power of two from 32 to 4096, found {self.block_size}"
            )
        if not isinstance(self.double_quant, bool):
            raise TypeError(f"double_quant must be True or False, found {self.double_quant!r}")
        _check_select(self.select)

    def _name(self) -> str:
        return f"nf4({self.block_size}{', double' if self.double_quant else ''})"

    def _codec(self, device: torch.device) -> Codec:
        return (DoubleNF4Codec if self.double_quant else NF4Codec)(self.block_size, device)

    def _between_blocks(self) -> int:
        return self.block_size

    def _parts(self, shape: Shape) -> list[tuple[str, torch.dtype, int]]:
        numel = math.prod(shape)
        blocks = -(-numel // self.block_size)
        codes = ("codes", torch.uint8, -(-numel // 2))
        if not self.double_quant:
            return [codes, ("scales", torch.float32, blocks)]
        second = ("scale_scales", torch.float32, -(-blocks // SCALES_NUMEL))
        return [codes, ("scales", torch.uint8, blocks), second, ("offset", torch.float32, 1)]


@dataclass(frozen=True)
class Int8(Format):
    """Eight bits for each element: an integer from -127 to 127, times a 127th of the largest
    absolute value of its block.

    Attributes:
        block_size: The elements of a block. Each block has one float32, its scale.
        select: A function `(name, ParamInfo) -> bool` that says which parameters a policy
            quantises. None: as for `NF4`.
        stochastic: For `reduce_format` alone: an element between two integers becomes either at
            random, so that the mean of many roundings is the element. False: it becomes the nearer
            one.
        seed: Of those random numbers. The same seed, on as many ranks, gives the same numbers in
            every run.

    Raises:
        ValueError: `block_size` is not allowed.
        TypeError: An attribute has the wrong type.

    Example::

        policy = zero3.ShardingPolicy(quantize=zero3.Int8(), param_dtype=torch.bfloat16)
    """

    block_size: int = 256
    select: Select | None = None
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", _size("block_size", self.block_size))
        _check_select(self.select)
        if not isinstance(self.stochastic, bool):
            raise TypeError(f"stochastic must be True or False, found {self.stochastic!r}")
        object.__setattr__(self, "seed", _integer("seed", self.seed))

    def _name(self) -> str:
        return (
            f"int8({self.block_size}{f', stochastic, seed {self.seed}' if self.stochastic else ''})"
        )

    def _codec(self, device: torch.device) -> Codec:
        if self.stochastic:
            raise ValueError(
                "stochastic=True is for ShardingPolicy(reduce_format=...): a tensor alone is "
                "quantised with stochastic=False"
            )
        return Int8Codec(self.block_size)

    def _between_blocks(self) -> int:
        return self.block_size

    def _parts(self, shape: Shape) -> list[tuple[str, torch.dtype, int]]:
        numel = math.prod(shape)
        return [
            ("codes", torch.int8, numel),
            ("scales", torch.float32, -(-numel // self.block_size)),
        ]


@dataclass(frozen=True)
class Float8(Format):
    """Eight bits for each element: a float8_e4m3fn, times one float32 for its tile of a matrix. The
    format of DeepSeek-V3.

    Attributes:
        block: The rows and columns of a tile. The last two dimensions of a parameter are its
            matrices'; tiles at the edges may be smaller.
        select: A function `(name, ParamInfo) -> bool` that says which parameters a policy
            quantises. None: as for `NF4`.

    Raises:
        ValueError: `block` is not allowed.
        TypeError: An attribute has the wrong type.

    Example::

        policy = zero3.ShardingPolicy(quantize=zero3.Float8(), param_dtype=torch.bfloat16)
    """

    block: tuple[int, int] = (128, 128)
    select: Select | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.block, tuple) or len(self.block) != 2:
            raise TypeError(f"block must be (rows, columns), found {self.block!r}")
        rows, columns = (_size("block", size) for size in self.block)
        object.__setattr__(self, "block", (rows, columns))
        _check_select(self.select)

    def _name(self) -> str:
        return f"float8({self.block[0]} x {self.block[1]})"

    def _codec(self, device: torch.device) -> Codec:
        return Float8Codec(*self.block, device)

    def _between_blocks(self) -> int:
        return 1

    def _parts(self, shape: Shape) -> list[tuple[str, torch.dtype, int]]:
        rows, columns = (1, *shape)[-2:] if shape else (1, 1)
        tiles = math.prod(shape[:-2]) * -(-rows // self.block[0]) * -(-columns // self.block[1])
        return [("codes", torch.float8_e4m3fn, math.prod(shape)), ("scales", torch.float32, tiles)]


@dataclass(frozen=True)
class MXFP4(Format):
    """Four bits for each element: a sign and one of 8 magnitudes, times a power of two for each 32
    elements. The format of gpt-oss.

    Attributes:
        transposed: Experts in one 3-D parameter are stored with their rows and columns exchanged,
            so that blocks run along what a product adds up. gpt-oss's files are stored so:
            transformers' parameters are the transposed of them.
        select: A function `(name, ParamInfo) -> bool` that says which parameters a policy
            quantises. None: as for `NF4`.

    Raises:
        TypeError: An attribute has the wrong type.

    Example::

        codes = zero3.MXFP4(transposed=True)
        policy = zero3.ShardingPolicy(quantize=codes, param_dtype=torch.bfloat16)
    """

    transposed: bool = False
    select: Select | None = None

    _codes_in_byte = 2

    def __post_init__(self) -> None:
        if not isinstance(self.transposed, bool):
            raise TypeError(f"transposed must be True or False, found {self.transposed!r}")
        _check_select(self.select)

    def _name(self) -> str:
        return "mxfp4(transposed)" if self.transposed else "mxfp4"

    def _codec(self, device: torch.device) -> Codec:
        return TransposedMXFP4Codec(device) if self.transposed else MXFP4Codec(device)

    def _between_blocks(self) -> int:
        return MXFP4_BLOCK_NUMEL

    def _parts(self, shape: Shape) -> list[tuple[str, torch.dtype, int]]:
        numel = math.prod(shape)
        return [
            ("codes", torch.uint8, -(-numel // 2)),
            ("scales", torch.uint8, -(-numel // MXFP4_BLOCK_NUMEL)),
        ]


def _integer(name: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # of numpy's integers, too
    except TypeError:
        raise TypeError(f"{name} must be an integer, found {value!r}") from None


def _size(name: str, value: Any) -> int:
    size = _integer(name, value)
    if size < 1:
        raise ValueError(f"{name} must be 1 or more, found {size}")
    return size


def _check_select(select: object) -> None:
    if select is not None and not callable(select):
        raise TypeError(
            f"select must be a function (name, ParamInfo) -> bool or None, found {select!r}"
        )
