"""The transformer that every system trains: pre-norm blocks, untied embedding and readout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.common.flags import Flags


@dataclass(frozen=True)
class Size(Flags):
    width: int = 512
    depth: int = 8
    heads: int = 8
    vocabulary: int = 4096
    sequence: int = 128
    batch: int = 4

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for module in layers(self) for parameter in module.parameters())


class Embedding(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Parameter(torch.randn(size.sequence, size.width) * 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv, self.out = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Readout(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x))


def layers(size: Size) -> list[nn.Module]:
    """The same values on every call and every rank."""
    torch.manual_seed(0)
    return [Embedding(size), *(Block(size) for _ in range(size.depth)), Readout(size)]


def batch(size: Size, step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    ids = torch.randint(0, size.vocabulary, (size.batch, size.sequence + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), labels.flatten())
