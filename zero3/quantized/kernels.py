"""A GPU's kernels in place of torch's operations: what they are told, and if there are some."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .sections import QuantizedTensor

__all__: list[str] = []

_log = logging.getLogger("zero3")


class FourBits(NamedTuple):
    """How codes of four bits are read, two in a byte."""

    values: Tensor  # of the sixteen codes, float32
    first: int  # the bits by which the first of both is shifted, 4 or 0
    size: int  # of the blocks that have one scale
    scales: Tensor | None  # what a scale's byte stands for, float32. None: it stands for itself


class Tiles(NamedTuple):
    """Which elements of matrices one after another share a scale: tiles, smaller at a matrix's
    lower and right edge.
    """

    rows: int  # of a matrix
    columns: int
    height: int  # of a tile
    width: int


class Kernels(Protocol):
    """The module `fused`."""

    def knows(self, codes: torch.dtype) -> bool: ...
    def encode(
        self, values: Tensor, codes: Tensor, scales: Tensor, size: int, key: int | None
    ) -> None: ...
    def decode(
        self, codes: Tensor, scales: Tensor, out: Tensor, size: int, *, add: bool
    ) -> None: ...
    def decode_tiles(
        self, kind: Tiles, quantized: QuantizedTensor, start: int, out: Tensor
    ) -> None: ...
    def decode_pairs(
        self, kind: FourBits, quantized: QuantizedTensor, start: int, out: Tensor
    ) -> None: ...


def kernels_on(
    device: torch.device, what: str, codes: torch.dtype, alike: Callable[[Kernels], bool]
) -> Kernels | None:
    """The kernels of `fused`, which then is imported. None: `device` is no GPU of NVIDIA's, or one
    that knows no such `codes`; or Triton is missing, compiles none, or makes what is not `alike`.

    `what`: the format, for a warning.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        if find_spec("triton") is None:
            return None
        fused: Kernels = import_module(f"{__package__}.fused")
        if not fused.knows(codes):
            return None
        if alike(fused):
            return fused
        reason: object = "their results differ"
    except Exception as error:  # of any kind: it compiles, with tools of the system
        reason = error
    _log.warning("%s goes by torch's operations, not by Triton's kernels: %s", what, reason)
    return None
