"""A small model of one's own that calls `zero3.attend`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import zero3
from tests.sequences.texts import WORDS


class Attention(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.all, self.out, self.how = nn.Linear(8, 24), nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(2, (4, 2)).transpose(1, 2) for each in self.all(x).chunk(3, -1))
        causal = partial(scaled_dot_product_attention, is_causal=True)
        found = causal(q, k, v) if self.how == "alone" else zero3.attend(causal, q, k, v)
        return x + self.out(found.transpose(1, 2).flatten(2))


HOWS = ["attend", "checkpoint", "reentrant", "both checkpoint", "both reentrant"]  # both: all blocks, and each of them in it


def run(function: Any, x: Tensor, how: str, *more: Tensor) -> Tensor:
    if not (torch.is_grad_enabled() and x.requires_grad) or not how.endswith(("checkpoint", "reentrant")):
        return function(x, *more)
    return checkpoint(function, x, *more, use_reentrant=how.endswith("reentrant"))


class Own(nn.Module):
    def __init__(self, how: str = "attend") -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(Attention(how) for _ in range(2))
        self.head = nn.Linear(8, WORDS)
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(run(self.all_blocks, self.embed(ids), self.how if self.how.startswith("both") else ""))

    def all_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = run(block, x, self.how)
        return x


def own(how: str = "attend", kind: type[Own] = Own) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(how).double()
