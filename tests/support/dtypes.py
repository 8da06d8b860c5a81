"""Every dtype that torch has, and values of any of them: bytes, since torch computes with few."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

ALL = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
NOT_COPIED = [dtype for dtype in ALL if re.match(r"torch\.(u?int[1-7]|qu?int\d+(x\d)?)$", str(dtype))]  # by torch itself
MOVED = [dtype for dtype in ALL if dtype not in NOT_COPIED]


def values(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> bytes:
    """NaN is not equal to itself, and some dtypes have no `==`."""
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).tolist())
