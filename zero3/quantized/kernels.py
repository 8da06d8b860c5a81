"""bitsandbytes' kernel that decodes NF4: it is used where it is installed and has the bits of our
own code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

__all__: list[str] = []

_log = logging.getLogger("zero3")

# (codes, the blocks' scales, dtype) -> values, 1-D
Kernel = Callable[[Tensor, Tensor, torch.dtype], Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# of longer blocks bitsandbytes' kernel for the CPU is not exact, and torch.compile takes its place
_LARGEST = 1024


def nf4_kernel(block_size: int, device: torch.device, ours: Kernel) -> Kernel | None:
    """bitsandbytes' kernel on this device. None: it is not installed, has none for the device, or
    not the bits of `ours`.
    """
    present = device.type == "cpu" or (device.type == "cuda" and torch.version.cuda is not None)
    if not present or block_size > _LARGEST or find_spec("bitsandbytes") is None:
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


def _alike(ours: Kernel, theirs: Kernel, block_size: int, device: torch.device) -> bool:
    """Compares them on all pairs of codes, with blocks of several scales and a last one that is
    short.
    """
    codes = torch.arange(256, dtype=torch.uint8, device=device).repeat(block_size // 64 + 2)[
        : -block_size // 4
    ]
    scales = torch.arange(1, -(-2 * codes.numel() // block_size) + 1, device=device) / 1000
    try:
        return all(
            ours(codes, scales, dtype).equal(theirs(codes, scales, dtype)) for dtype in DTYPES
        )
    except RuntimeError:  # it has no kernel for this device
        return False
