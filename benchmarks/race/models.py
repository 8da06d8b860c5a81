"""The models of the race: a Llama as pre-training recipes have it, and the same with experts. Made on the meta device.

A block is what the published figures were measured with: normalisation written out in fp32, rotary embeddings by complex numbers, keys
and values repeated for their groups, torch's attention. Nothing is fused by hand, so each operation is a kernel, and saves what it saves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import zero3


@dataclass(frozen=True)
class Shape:
    blocks: int
    width: int
    inner: int
    heads: int
    groups: int  # of keys and values
    words: int
    experts: int = 0
    chosen: int = 2  # experts of a token

    @property
    def parameters(self) -> int:
        attention = 2 * self.width**2 + 2 * self.width**2 * self.groups // self.heads
        mlp = 3 * self.width * self.inner * max(1, self.experts) + self.experts * self.width
        return self.blocks * (attention + mlp + 2 * self.width) + self.width + 2 * self.words * self.width


SHAPES = {
    "tiny": Shape(3, 64, 128, 4, 2, 512),
    "tiny-moe": Shape(3, 64, 128, 4, 2, 512, experts=4),
    "small": Shape(4, 512, 1408, 8, 4, 4096),
    "7b": Shape(32, 4096, 11008, 32, 32, 32000),
    "8b": Shape(32, 4096, 14336, 32, 8, 128256),
    "70b": Shape(80, 8192, 28672, 64, 8, 128256),
    "moe": Shape(32, 4096, 14336, 32, 8, 32000, experts=8),  # 46.7 billion, of which a token uses 12.9
}


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1], None]).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size, self.repeats = shape.width // shape.heads, shape.heads // shape.groups
        small = shape.groups * self.size
        self.q, self.k, self.v = (nn.Linear(shape.width, wide, bias=False) for wide in (shape.width, small, small))
        self.o = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, self.size)) for project in (self.q, self.k, self.v))
        q, k = rotated(q, turns), rotated(k, turns)
        k, v = (self._repeated(each).transpose(1, 2) for each in (k, v))
        causal = partial(functional.scaled_dot_product_attention, is_causal=True)
        found = zero3.attend(causal, q.transpose(1, 2), k, v)  # where ranks hold whole sequences, a plain call
        return self.o(found.transpose(1, 2).contiguous().flatten(2))

    def _repeated(self, x: Tensor) -> Tensor:
        if self.repeats == 1:
            return x
        return x.unsqueeze(3).expand(-1, -1, -1, self.repeats, -1).flatten(2, 3)


class Gated(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """They have as much room as an even spread takes; nothing asks the host."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_experts = shape.experts
        self.gate, self.up = (nn.Parameter(torch.empty(shape.experts, shape.width, shape.inner)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(shape.experts, shape.inner, shape.width))

    def forward(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order, each = chosen.flatten().argsort(), chosen.shape[1]  # by expert; an even spread gives all the same number
        rows = tokens.index_select(0, order // each).view(self.num_experts, -1, tokens.shape[1])
        found = torch.bmm(functional.silu(torch.bmm(rows, self.gate)) * torch.bmm(rows, self.up), self.down).flatten(0, 1)
        found = found * weights.flatten().index_select(0, order).unsqueeze(1)
        return torch.zeros_like(tokens).index_add(0, order // each, found)


class Mixture(nn.Module):
    """Each token goes to the experts that its router prefers."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.chosen = shape.chosen
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.chosen)
        return self.experts(tokens, chosen, weights).view_as(x)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(shape.width), Norm(shape.width)
        self.attention = Attention(shape)
        self.mlp = Mixture(shape) if shape.experts else Gated(shape)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), turns)
        return x + self.mlp(self.norm2(x))


class Readout(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm, self.logits = Norm(shape.width), nn.Linear(shape.width, shape.words, bias=False)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        if labels is None:
            return self.logits(self.norm(x))
        return zero3.linear_cross_entropy(self.norm(x), self.logits, labels, reduction="sum")


class Model(nn.Module):
    def __init__(self, shape: Shape, sequence: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.words, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.readout = Readout(shape)
        self.register_buffer("turns", torch.empty(sequence, shape.width // shape.heads // 2, dtype=torch.complex64), persistent=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """The logits; with labels the sum of the losses."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.turns)
        return self.readout(x, labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def every_second_product() -> Any:
    """torchtitan's selective checkpointing by operator: attention and every second product are kept, all else is computed anew."""
    aten, seen = torch.ops.aten, Counter[bool]()
    kept = {aten.mm.default, aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default}

    def decide(context: Any, function: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        seen[context.is_recompute] += function is aten.mm.default
        keep = function in kept and not (function is aten.mm.default and seen[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


CHECKPOINTING: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda block: block,
    "full": lambda block: checkpoint_wrapper(block, preserve_rng_state=False),
    "selective": lambda block: checkpoint_wrapper(block, context_fn=every_second_product, preserve_rng_state=False),
}


def model_of(name: str, sequence: int, checkpointing: str, device: str = "meta") -> Model:
    with torch.device(device):
        model = Model(SHAPES[name], sequence)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = CHECKPOINTING[checkpointing](block)
    return model
