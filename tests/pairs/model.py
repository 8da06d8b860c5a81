"""What every pair trains: an embedding, three blocks, a norm and a head; tied, frozen or with adapters, as the pair asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import ONE_GENERATOR, Fuse

WORDS, WIDTH, BLOCKS = 11, 8, 3
FAR = 2.0**30  # in fp32 a number as large as this one has lost what is added to it


@dataclass(frozen=True)
class Shape:
    """What the rows of a pair ask of the model."""

    tied: bool = False
    adapted: bool = False  # all but the adapters is frozen
    frozen: bool = False  # a block
    reentrant: bool | None = None  # None: blocks are not recomputed
    dtype: torch.dtype = torch.float64
    meta: bool = False  # ranks make it without values
    experts: bool = False  # two blocks have experts
    attends: bool = False  # tokens see each other


class Experts(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.num_experts = 3
        self.up, self.down = nn.Parameter(torch.randn(3, hidden, WIDTH) / 3), nn.Parameter(torch.randn(3, WIDTH, hidden) / 3)
        self.bias = nn.Parameter(torch.randn(3, hidden) / 3)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            row, place = (index == expert).nonzero(as_tuple=True)
            inner = torch.tanh(nn.functional.linear(hidden[row], self.up[expert]) + self.bias[expert])
            out = out.index_add(0, row, (nn.functional.linear(inner, self.down[expert]) * weights[row, place, None]).to(out.dtype))
        return out


class Mixture(nn.Module):
    """Two of three experts for each word: by its place, since what is computed may be rounded."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), Experts(hidden)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        place = torch.arange(len(flat), device=x.device)
        index = torch.stack([place % 3, (place * 2 + place // 3 + 1) % 3], 1)
        return self.experts(flat, index, self.router(flat).softmax(-1).gather(1, index)).view_as(x)


class Block(nn.Module):
    def __init__(self, hidden: int, adapted: bool, experts: bool = False, attends: bool = False) -> None:
        super().__init__()
        self.attends = attends
        self.mixture = Mixture((hidden - 32) // 2) if experts else None
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.first = nn.Parameter(torch.randn(1, WIDTH) / 3) if adapted else None
        self.second = nn.Parameter(torch.randn(WIDTH, 1) / 3) if adapted else None

    def forward(self, x: Tensor, unused: str = "") -> Tensor:
        """`unused`: what of it computes nothing: "bias", "block" or nothing."""
        if unused == "block":
            return x * 1
        if self.attends:
            heads = x.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
            found = zero3.attend(scaled_dot_product_attention, heads, heads * 0.5, torch.tanh(heads))
            x = x + found.transpose(1, 2).flatten(2)
        hidden = torch.tanh(self.up(x))
        y = linear(hidden, self.down.weight) if unused == "bias" else self.down(hidden)
        y = y if self.mixture is None else y + self.mixture(x)
        return x + y if self.first is None or self.second is None else x + y + x @ self.first.t() @ self.second.t()

    def features(self, x: Tensor) -> Tensor:
        """Another method than `forward`."""
        return torch.tanh(self.up(x)) * self.down.bias[0]


class Model(nn.Module):
    """Words `[B, T]` and numbers `[B, T, 1]` to the scores of words `[B, T, WORDS]`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        blocks = [Block(40 + 8 * number, shape.adapted, shape.experts and number > 0, shape.attends) for number in range(BLOCKS)]
        self.blocks = nn.ModuleList(blocks)  # inner widths tell blocks apart
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        if shape.tied:
            self.head.weight = self.embed.weight
        self.reentrant = shape.reentrant
        self.blows: tuple[str, type[BaseException]] | None = None  # in which phase to fail, and with what
        self.skips: set[int] = set()
        self.unused: dict[int, str] = {}
        self.targets: Tensor | None = None  # then the model gives its loss, and makes no logits

    def forward(self, words: Tensor, numbers: Tensor) -> Tensor:
        hidden = self.norm(self.through_blocks(words, numbers))
        if self.targets is None:
            return self.head(hidden)
        return zero3.linear_cross_entropy(hidden, self.head, self.targets.view_as(words), reduction="sum") / words.numel()

    def encode(self, words: Tensor, numbers: Tensor) -> Tensor:
        """Another method than `forward`. It reads parameters of the root's own."""
        return self.norm(self.through_blocks(words, numbers)) * self.scale

    def through_blocks(self, words: Tensor, numbers: Tensor) -> Tensor:
        x: Tensor = self.embed(words)
        x = x + (numbers - FAR).to(x.dtype)
        for number, block in enumerate(self.blocks):
            if number == 2:
                x = Fuse.apply(x, self)
            if number in self.skips:
                continue
            given = (self.unused[number],) if number in self.unused else ()
            if self.reentrant is not None and torch.is_grad_enabled():
                x = checkpoint(block, x if x.requires_grad else x.requires_grad_(), *given, use_reentrant=self.reentrant)
            else:
                x = block(x, *given)
        return x


def is_adapter(name: str) -> bool:
    return name.endswith((".first", ".second"))


def is_base(name: str, info: Any = None) -> bool:
    """What `quantize` is to choose in an adapted model."""
    return name.endswith(("up.weight", "down.weight", "experts.up", "experts.down"))


def made(shape: Shape, seed: int = 0, meta: bool = False) -> Any:
    with ONE_GENERATOR, torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.manual_seed(seed)
        model = Model(shape).to(shape.dtype)
    for name, parameter in model.named_parameters():
        still = (shape.adapted and not is_adapter(name)) or (shape.frozen and name.startswith("blocks.1."))
        parameter.requires_grad_(not still)
    return model


def shaped(asked: list[Mapping[str, Any]]) -> Shape:
    shape = Shape()
    for each in asked:
        shape = replace(shape, **each)
    return shape


def drawn(module: nn.Module) -> None:
    """First values without a generator, for `materialize`."""
    for parameter in module.parameters(recurse=False):
        values = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64) * 1.7 + parameter.ndim) * 0.4
        with torch.no_grad():
            parameter.copy_(values.view(parameter.shape))


@dataclass(frozen=True)
class Data:
    """One micro-batch of one rank. `rows`: ranks may have different numbers of tokens."""

    seed: int
    rows: int = 2
    whole: tuple[Data, ...] = ()  # those of all ranks that share its sequences

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        words = torch.randint(WORDS, (self.rows, 3), generator=generator)
        numbers = torch.randn(self.rows, 3, 1, generator=generator, dtype=torch.float64) + FAR
        return words.to(device), numbers.to(device)

    def targets(self, device: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(WORDS, (self.rows * 3,), generator=generator).to(device)
