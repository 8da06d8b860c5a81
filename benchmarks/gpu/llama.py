"""A stack of blocks with the shapes of a Llama: RMSNorm, grouped-query attention, gated MLP; no embedding, no head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    groups: int = 8  # of keys and values
    sequence: int = 2048
    batch: int = 1

    @property
    def block_parameters(self) -> int:
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.hidden * self.groups // self.heads
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden


TINY = Shape(hidden=64, intermediate=128, heads=4, groups=2, sequence=16)


class LlamaBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.groups = shape.heads, shape.groups
        small = shape.hidden * shape.groups // shape.heads
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.q, self.o = (nn.Linear(shape.hidden, shape.hidden, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(shape.hidden, small, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(shape.hidden, shape.intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q = self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (part(normed).unflatten(-1, (self.groups, -1)).transpose(1, 2) for part in (self.k, self.v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def stack(shape: Shape, depth: int, device: str) -> list[nn.Module]:
    """`depth` blocks in bf16, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return [LlamaBlock(shape) for _ in range(depth)]
    finally:
        torch.set_default_dtype(before)
