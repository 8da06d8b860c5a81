"""A user's own experts in a small model, and its training beside one process that has the tokens of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3

H, K = 6, 2
TOKENS = (5, 3, 7, 0)  # of each rank


class Experts(nn.Module):
    """Takes its inputs by names of its own."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up, self.down = nn.Parameter(torch.randn(experts, 8, H) * 0.4), nn.Parameter(torch.randn(experts, H, 8) * 0.4)
        self.bias, self.norm = nn.Parameter(torch.randn(experts, 8) * 0.1), nn.LayerNorm(H)  # experts share the norm
        self.fails = False
        self.calls: list[tuple[int, ...]] = []  # what each call has seen

    def forward(self, x: Tensor, which: Tensor, how_much: Tensor) -> Tensor:
        self.calls.append((self.num_experts, len(self.up), len(self.down), len(self.bias), *which.shape))
        if self.fails:
            raise ArithmeticError("experts")
        assert not which.numel() or int(which.max()) < self.num_experts
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            row, slot = (which == expert).nonzero(as_tuple=True)
            made = torch.tanh(x[row] @ self.up[expert].t() + self.bias[expert]) @ self.down[expert].t()
            out = out.index_add(0, row, self.norm(made) * how_much[row, slot, None].to(made.dtype))
        return out


class Block(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.norm, self.router, self.experts = nn.LayerNorm(H), nn.Linear(H, experts), Experts(experts)
        self.fails, self.checkpoints, self.routes = False, "", ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError("a block")
        hidden = self.norm(x)
        weights, which = self.router(hidden).softmax(-1).topk(K)
        if self.routes == "one":
            which = torch.zeros_like(which)
        elif self.routes == "first":
            which = which % 2
        if self.checkpoints and torch.is_grad_enabled():
            made = checkpoint(self.experts, hidden, which, weights, use_reentrant=self.checkpoints == "reentrant")
        else:
            made = self.experts(hidden, how_much=weights, which=which)
        return x + made


class Model(nn.Module):
    def __init__(self, experts: int, blocks: int = 2) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(H, H), nn.ModuleList(Block(experts) for _ in range(blocks)), nn.Linear(H, H)
        self.checkpoints = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = (
                checkpoint(block, x, use_reentrant=self.checkpoints == "reentrant")
                if self.checkpoints and torch.is_grad_enabled()
                else block(x)
            )
        return self.last(x)


def made(experts: int = 5, dtype: torch.dtype = torch.float64, seed: int = 0) -> Model:
    state = torch.Generator().manual_seed(seed)
    model = Model(experts)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=state) * 0.4)
    return model.to(dtype)


def tokens(rank: int, number: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Of micro-batch `number`. In every fourth all ranks have some."""
    count = TOKENS[rank % len(TOKENS)] if number % 4 else 4
    return torch.randn(count, H, generator=torch.Generator().manual_seed(50 * number + rank)).to(dtype)


Prepare = Callable[[Model], Any]


class Training:
    """Both sides of a training: on a group's ranks, and in one process."""

    def __init__(self, group: Any, policy: zero3.ShardingPolicy, experts: int = 5, prepare: Prepare = lambda model: None) -> None:
        self.policy, self.rank, self.ranks = policy, group.rank, group.world_size
        self.group = group
        self.plain, self.model = made(experts), made(experts)
        prepare(self.plain), prepare(self.model)
        if (kind := policy.quantize) is not None:
            for block in self.plain.blocks:
                for values in (block.experts.up.data, block.experts.down.data):
                    values.copy_(kind.dequantize(kind.quantize(values), values.dtype))
        zero3.shard(self.model, [*self.model.blocks], policy=policy, process_group=getattr(group, "mesh", group))
        self.optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(self.model), lr=0.02)
        self.of_plain = torch.optim.AdamW([p for p in self.plain.parameters() if p.requires_grad], lr=0.02)

    def micro(self, number: int, around: AbstractContextManager[Any] | None = None, *, drops: bool = False) -> None:
        with around or nullcontext():
            self.model(tokens(self.rank, number)).square().sum().backward()
        if not drops:
            share = 1 if self.policy.gradient_reduction == "sum" else self.ranks
            for rank in range(self.ranks):
                (self.plain(tokens(rank, number)).square().sum() / share).backward()

    def step(self, *, clips: bool = True) -> None:
        if clips:
            norm = zero3.clip_grad_norm_(self.model, 0.3)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(self.plain.parameters(), 0.3))
        for optimizer in (self.optimizer, self.of_plain):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int = 3, micros: int = 1, first: int = 0, keeps: bool = False) -> Training:
        for step in range(first, first + steps):
            for micro in range(micros):
                self.micro(micros * step + micro, zero3.no_sync(self.model) if keeps and micro < micros - 1 else None)
            self.step()
        return self

    def check(self, tolerance: float = 1e-9) -> Training:
        found = zero3.full_state_dict(self.model, rank0_only=False)
        for name, parameter in self.plain.named_parameters():
            assert found[name].shape == parameter.shape
            torch.testing.assert_close(found[name], parameter.detach(), rtol=tolerance, atol=tolerance)
        with torch.no_grad():
            ours = self.model(tokens(self.rank, 99))
            torch.testing.assert_close(ours, self.plain(tokens(self.rank, 99)), rtol=tolerance, atol=tolerance)
        return self

    def experts(self) -> Iterator[Experts]:
        for block in self.model.blocks:
            yield block.experts.module if isinstance(block.experts, zero3.Zero3Layer) else block.experts
