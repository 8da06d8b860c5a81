"""State in blocks: an optimizer as bitsandbytes and torchao have them, for models as small as tests have them, and a model whose gradients
have the same bits whatever the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import zero3

BLOCK = 2
SHORTEST = 16 * BLOCK  # elements of a parameter from which on its state is quantised


class InBlocks(torch.optim.Optimizer):
    """SGD with momentum. A long parameter's momentum is codes in the parameter's shape, a scale for each block of two elements, and a
    table that all share. A short one's is as plain SGD has it.
    """

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, self.state[p], group["lr"], group["momentum"])
        return loss

    def one(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float, momentum: float) -> None:
        quantised = p.numel() >= SHORTEST and p.numel() % BLOCK == 0
        if not state:
            state["step"] = 0
            if quantised:
                state["codes"] = torch.zeros_like(p, dtype=torch.int8)
                state["scales"] = torch.zeros(p.numel() // BLOCK, dtype=p.dtype, device=p.device)
                state["levels"] = torch.arange(-127, 128, dtype=p.dtype, device=p.device) / 127
            else:
                state["momentum"] = torch.zeros_like(p)
        state["step"] += 1
        if quantised:
            levels, scales = state["levels"], state["scales"]
            old = (levels[state["codes"].reshape(-1).long() + 127].view(-1, BLOCK) * scales[:, None]).view_as(p)
        else:
            old = state["momentum"]
        new = momentum * old + gradient
        if quantised:
            rows = new.reshape(-1, BLOCK)
            scales.copy_(rows.abs().amax(1))
            state["codes"].copy_((rows / scales.clamp(min=1e-30)[:, None] * 127).round().view_as(p))
        else:
            old.copy_(new)
        p.sub_(new, alpha=lr)


class Part(nn.Module):
    def __init__(self, number: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.number = number
        self.value = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(number)))

    def forward(self, seeds: list[int]) -> Tensor:
        """Gradients are small whole numbers, whose sums over ranks have the same bits in any order."""
        generators = [torch.Generator().manual_seed(100 * seed + self.number) for seed in seeds]
        slopes = [torch.randint(-3, 4, self.value.shape, generator=generator) for generator in generators]
        return (self.value * torch.stack(slopes).sum(0)).sum()


class Block(nn.Module):
    """A parameter of each of `shapes`."""

    def __init__(self, number: int, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(20 * number + n, shape) for n, shape in enumerate(shapes))

    def forward(self, seeds: list[int]) -> Tensor:
        return torch.stack([part(seeds) for part in self.parts]).sum()


class Parts(nn.Module):
    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, shapes) for number in range(2))

    def forward(self, seeds: list[int]) -> Tensor:
        return torch.stack([block(seeds) for block in self.blocks]).sum()


def together(step: int) -> list[int]:
    """The data of all ranks, however many they are."""
    return [12 * step + number for number in range(12)]


def own(rank: int, world_size: int) -> Callable[[int], list[int]]:
    return lambda step: together(step)[rank::world_size]


def go(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, seeds: Callable[[int], list[int]]) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(seeds(step)).backward()
        optimizer.step()


def assert_equal(model: nn.Module, plain: nn.Module, what: str) -> None:
    found = zero3.full_state_dict(model, rank0_only=False)
    for name, value in plain.named_parameters():
        assert torch.equal(found[name], value.detach()), f"{what}: {name}"
