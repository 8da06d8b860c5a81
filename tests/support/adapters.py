"""A small model whose base is frozen under adapters, in fp64, and what its transfers show."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.ranks import ThreadCommunicator
from tests.support.stacks import WIDTH, Block, Stack, built

_ONE_GENERATOR = threading.Lock()  # which all threads share: models are made one at a time
WIDE = 50  # so wide that adapters are less than a sixteenth of the model


class AdaptedBlock(Block):
    """A frozen block and an adapter of rank 1 around it, as LoRA puts one around a matrix."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.a, self.b = nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.b(self.a(x))


def adapted(depth: int = 3, first: int = 0, tied: bool = False) -> Stack:
    """Blocks from number `first` on have adapters."""
    with _ONE_GENERATOR:
        model: Stack = built(lambda: Stack(*[(AdaptedBlock if i >= first else Block)(WIDE + i) for i in range(depth)], tied=tied))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((".a.weight", ".b.weight")))
    return model


def adapter_numel(depth: int = 3) -> int:
    return 2 * WIDTH * depth


def took(group: ThreadCommunicator, kind: str) -> list[int]:
    """The lengths of the full buffers of one kind of transfer since the last question, in order."""
    found = [entry.numel for entry in group.log if entry.kind == kind]
    group.log[:] = [entry for entry in group.log if entry.kind != kind]
    return found


def values_of(model: Any, group: ThreadCommunicator) -> list[Tensor]:
    """Copies of all chunks, without a transfer."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
