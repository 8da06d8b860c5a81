"""What tests need of FSDP2, to compare with it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad


def whole(part: Any, group: Any = None) -> Tensor:
    """All rows of what FSDP2 has cut over `group` (None: all ranks). They call it. (In torch 2.11 gloo can't do its `full_tensor`.)"""
    local, count, ranks = part.detach().to_local(), part.shape[0], dist.get_world_size(group)
    rows = -(-count // ranks)
    mine = pad(local, (0, 0) * (local.dim() - 1) + (0, rows - local.shape[0]))
    every = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(every, mine, group=group)
    return torch.cat(every)[:count]
