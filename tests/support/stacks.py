"""Small models as people write them: a list of blocks between an embedding and a head. fp64, the same at every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from tests.support.reference import Turn

WORDS, WIDTH = 23, 5


def built(make: Callable[[], nn.Module]) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double()


class Block(nn.Module):
    """A residual block; its inner width tells blocks apart by the sizes of their transfers."""

    kind = "full"

    def __init__(self, hidden: int = 7) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Words `[B, T]` to the scores of words `[B, T, WORDS]`."""

    def __init__(self, *blocks: nn.Module, tied: bool = False, words: int = WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.through_blocks(self.embed(words))))

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(depth: int = 3, tied: bool = False, words: int = WORDS) -> Stack:
    return built(lambda: Stack(*[Block(7 + i) for i in range(depth)], tied=tied, words=words))


def words_of(turn: Turn) -> Tensor:
    return turn.integers(WORDS, 2, 4)


def loss_of(model: nn.Module, turn: Turn) -> Tensor:
    return cross_entropy(model(words_of(turn)).flatten(0, 1), turn.integers(WORDS, 2, 4).flatten())


def train(model: nn.Module, turn: Turn) -> Tensor:
    loss = loss_of(model, turn)
    loss.backward()
    return loss


def train_and_look(model: nn.Module, turn: Turn) -> Tensor:
    """As `train`; then gradients are asked what every optimizer asks: at stage 1 they are reduced by that."""
    loss = train(model, turn)
    assert not any(p.grad.is_sparse for p in model.parameters() if p.grad is not None)
    return loss
