"""Models drawn at random, on 1 to 4 ranks: three steps equal those of the unwrapped model to rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import seeded
from tests.support.reference import Shard, Turn, as_one_layer, check_parity, in_place, nested

WORDS = 11


class Residual(nn.Module):
    """A block of some parts, one after another, added to its input; perhaps recomputed in backward."""

    def __init__(self, parts: list[nn.Module], width: int, recompute: bool | None) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.recompute = recompute  # the kind: reentrant or not; None: kept

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute is None:
            return x + self.scale * self.parts(x)
        return x + self.scale * checkpoint(self.parts, x, use_reentrant=self.recompute, preserve_rng_state=False)


class Convolved(nn.Module):
    """A convolution along the width."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.unsqueeze(1)).squeeze(1)


class Masked(nn.Module):
    """Frozen integers choose the features, a row of parameters weighs them, and nobody uses another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.randperm(width), requires_grad=False)
        self.row = nn.Parameter(torch.randn(width))
        self.idle = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order] * self.row


class Tied(nn.Module):
    """One weight under two names, one of them transposed by use."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.there, self.back = nn.Linear(width, width), nn.Linear(width, width)
        self.back.weight = self.there.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.there(x).tanh())


class InPlace(nn.Module):
    """No parameters, and its input overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        return x.clone().mul_(0.7).add_(0.1)


PARTS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda width: nn.Linear(width, width),
    "no bias": lambda width: nn.Linear(width, width, bias=False),
    "bottleneck": lambda width: nn.Sequential(nn.Linear(width, 2), nn.GELU(), nn.Linear(2, width)),
    "norm": nn.LayerNorm,
    "tanh": lambda width: nn.Tanh(),
    "in place": lambda width: InPlace(),
    "convolution": lambda width: Convolved(),
    "masked": Masked,
    "tied": Tied,
}


@dataclass(frozen=True)
class Plan:
    """Everything that is drawn of a model; shrinks and prints well."""

    width: int
    blocks: tuple[tuple[str, ...], ...]
    recompute: tuple[bool | None, ...]  # a block
    calls: tuple[int, ...]  # indices of blocks, in the order in which they are called
    frozen: tuple[bool, ...]  # a block
    embeds: bool
    around: bool | None  # whether whole layers are recomputed, and by which kind of checkpoint

    def build(self) -> nn.Module:
        makers = [
            lambda parts=parts, recompute=recompute: Residual([PARTS[part](self.width) for part in parts], self.width, recompute)
            for parts, recompute in zip(self.blocks, self.recompute, strict=True)
        ]
        first = (lambda: nn.Embedding(WORDS, self.width)) if self.embeds else (lambda: nn.Linear(self.width, self.width))
        model = Called(*seeded(first, *makers, lambda: nn.Linear(self.width, 3)))
        model.around = self.around
        model.calls = [0, *(1 + index for index in self.calls), len(model) - 1]
        for index, frozen in enumerate(self.frozen):
            if frozen:
                model[1 + index].requires_grad_(False)
        return model


class Called(nn.Sequential):
    """Calls its modules in an order of its own, some several times, some never, the inner ones perhaps in checkpoints."""

    calls: list[int]
    around: bool | None

    def forward(self, x: Tensor) -> Tensor:
        for index in self.calls:
            if self.around is None or index == 0:
                x = self[index](x)
            else:
                x = checkpoint(self[index], x, use_reentrant=self.around, preserve_rng_state=False)
        return x


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    count = draw(st.integers(1, 4))
    blocks = draw(st.lists(st.lists(st.sampled_from(sorted(PARTS)), min_size=1, max_size=3).map(tuple), min_size=count, max_size=count))
    return Plan(
        width=draw(st.integers(1, 6)),
        blocks=tuple(blocks),
        recompute=tuple(draw(st.lists(st.sampled_from([None, None, False, True]), min_size=count, max_size=count))),
        calls=tuple(draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=5))),
        frozen=tuple(draw(st.lists(st.booleans(), min_size=count, max_size=count))),
        embeds=draw(st.booleans()),
        around=draw(st.sampled_from([None, None, False, True])),
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-2),
}


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    plan=plans(),
    world_size=st.integers(1, 4),
    shard=st.sampled_from([in_place, nested, as_one_layer]),
    depth=st.integers(0, 2),
    reshard=st.booleans(),
    reduction=st.sampled_from(["mean", "sum"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    batches=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    micro_batches=st.integers(1, 2),
    parts=st.booleans(),
)
def test_any_model_trains_as_unwrapped_with_any_shardingpolicy(
    plan: Plan,
    world_size: int,
    shard: Shard,
    depth: int,
    reshard: bool,
    reduction: Any,
    optimizer: str,
    batches: list[int],
    micro_batches: int,
    parts: bool,
) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        losses = []
        for micro_batch in range(micro_batches):
            rows = batches[(turn.rank + turn.step + micro_batch) % len(batches)]
            x = turn.integers(WORDS, rows) if plan.embeds else turn.tensor(rows, plan.width, requires_grad=True)
            loss = model(x).pow(2).sum() / 4
            loss.backward()
            losses.append(loss)
        return losses

    policy = zero3.ShardingPolicy(prefetch_depth=depth, reshard_after_forward=reshard, gradient_reduction=reduction)
    ways: Any = {"world_size": world_size, "shard": shard, "policy": policy, "optimizer": OPTIMIZERS[optimizer], "parts": parts}
    check_parity(plan.build, program, steps=3, tolerance=1e-11, **ways)
