"""shard()'s own choice of layers: blocks wherever they lie, large embeddings, towers; and how large the root's own layer is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import zero3
from tests.support.reference import Turn, by_shard, check_parity
from tests.support.stacks import WIDTH, Block, Stack, built, train
from zero3.auto_wrap import choose, tied_across
from zero3.modules import find_parameters


def chosen(model: nn.Module) -> list[str]:
    return [name for ((name, _),) in choose(model, None)]


def root_and_largest(model: nn.Module) -> tuple[int, int]:
    """Elements of the root's own layer, and of the largest other one."""
    parts = choose(model, None)
    tied = tied_across(model, [tuple(module for _, module in part) for part in parts])
    layers = [each for part in parts for each in part]
    inside = {id(module) for _, module in layers}

    def numel(unit: nn.Module) -> int:
        return sum(b.parameter.numel() for b in find_parameters(unit, lambda m: m is not unit and id(m) in inside, elsewhere=tied))

    return numel(model) + sum(sites.parameter.numel() for sites in tied.values()), max(numel(module) for _, module in layers)


class Blocks(nn.Module):
    """Vectors `[B, WIDTH]` to vectors, through whatever its list holds."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.through(self.blocks, x))

    def through(self, modules: Any, x: Tensor) -> Tensor:
        for module in modules:
            x = self.through(module, x) if isinstance(module, nn.ModuleList) else self.enter(module, x)
        return x

    def enter(self, module: Any, x: Tensor) -> Tensor:
        return self.through(module.inner, x) * module.scale if type(module) is nn.Module else module(x)


def bare(depth: int) -> nn.Module:
    """A module without a forward, which only holds others, and a parameter."""
    module = nn.Module()
    module.inner = nn.ModuleList([Block(7 + depth), Block(8 + depth)])
    module.scale = nn.Parameter(torch.tensor(1.5))
    return module


LISTS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "a list of lists": (
        lambda: nn.ModuleList([nn.ModuleList([Block(7), Block(8)]) for _ in range(2)]),
        ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"],
    ),
    "modules without a forward": (
        lambda: nn.ModuleList([bare(0), bare(2)]),
        ["blocks.0.inner.0", "blocks.0.inner.1", "blocks.1.inner.0", "blocks.1.inner.1"],
    ),
    "lists of both": (
        lambda: nn.ModuleList([nn.ModuleList([bare(0), Block(9)]), Block(3)]),
        ["blocks.0.0.inner.0", "blocks.0.0.inner.1", "blocks.0.1", "blocks.1"],
    ),
    "elements without parameters": (lambda: nn.ModuleList([Block(7), nn.Tanh(), Block(8)]), ["blocks.0", "blocks.2"]),
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_lists_that_hold_other_than_blocks(name: str, world_size: int) -> None:
    make, expected = LISTS[name]

    def program(model: nn.Module, turn: Turn) -> Tensor:
        loss = model(turn.tensor(3, WIDTH)).pow(2).sum()
        loss.backward()
        return loss

    assert chosen(built(lambda: Blocks(make()))) == expected
    check_parity(lambda: built(lambda: Blocks(make())), program, world_size=world_size, shard=by_shard)


class Codebooks(Stack):
    """Several embeddings in a list, which get_input_embeddings() gives as it is (Musicgen)."""

    def __init__(self) -> None:
        super().__init__(Block(7), Block(8))
        self.embed = nn.ModuleList([nn.Embedding(23, WIDTH), nn.Embedding(23, WIDTH)])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.through_blocks(self.embed[0](words) + self.embed[1](words.flip(0)))))


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_embedding_that_is_a_list(world_size: int) -> None:
    assert chosen(built(Codebooks)) == ["embed.0", "embed.1", "blocks.0", "blocks.1", "head"]
    check_parity(lambda: built(Codebooks), train, world_size=world_size, shard=by_shard)


class Tower(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def grown(**extra: nn.Module | nn.Parameter) -> Stack:
    """Blocks of 215 elements, and what is put beside them."""
    model = built(lambda: Stack(*[Block(19) for _ in range(20)]))
    model.get_input_embeddings = lambda: model.embed
    for name, value in extra.items():
        setattr(model, name, value)
    return model


EXTRAS: dict[str, tuple[Callable[[], dict[str, Any]], list[str]]] = {
    "another embedding": (lambda: {"per_layer": nn.Embedding(40, WIDTH)}, ["per_layer"]),
    "a small embedding": (lambda: {"positions": nn.Embedding(10, WIDTH)}, []),
    "a tower": (lambda: {"vision": Tower(Block(5), Block(6))}, ["vision.parts.0", "vision.parts.1"]),
    "a list of small things": (lambda: {"gates": nn.ModuleList([nn.Linear(2, 1) for _ in range(9)])}, []),
    "a large head somewhere": (lambda: {"heads": nn.ModuleDict({"main": nn.Linear(WIDTH, 60)})}, ["heads.main"]),
    "a large parameter in a module": (lambda: {"table": _Table(80)}, ["table"]),
    "what reads its parts' parameters": (lambda: {"attention": nn.MultiheadAttention(10, 2)}, ["attention"]),
    "a convolution with weight_norm": (lambda: {"position": weight_norm(nn.Conv1d(WIDTH, WIDTH, 9))}, ["position"]),
    "several parts": (lambda: {"resampler": nn.Sequential(nn.Linear(WIDTH, 30), nn.Linear(30, WIDTH))}, ["resampler.0"]),
}


class _Table(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.small = nn.Parameter(torch.ones(rows, WIDTH)), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rows.sum(0)


@pytest.mark.parametrize("name", EXTRAS)
def test_the_root_is_no_larger_than_a_block(name: str) -> None:
    make, expected = EXTRAS[name]
    usual = set(chosen(grown()))
    model = grown(**make())
    assert [layer for layer in chosen(model) if layer not in usual] == expected
    root, largest = root_and_largest(model)
    assert root <= largest
    zero3.shard(model)
    train(model, Turn(0, 0, 1))


def test_what_is_tied_stays_in_the_root() -> None:
    model = grown()
    model.head.weight = model.embed.weight
    assert not {"embed", "head"} & set(chosen(model))
    model = grown(heads=nn.ModuleList([nn.Linear(WIDTH, 23, bias=False), nn.Linear(WIDTH, 23, bias=False)]))
    model.heads[0].weight = model.embed.weight
    assert {"embed", "heads.0"}.isdisjoint(chosen(model)) and "heads.1" in chosen(model), "nor does a layer hold nothing of its own"


def test_attention_that_is_tied_is_not_taken_apart() -> None:
    """Its output map is no layer: attention reads that one's parameters, and does not call it."""
    model = grown(attention=nn.MultiheadAttention(10, 2), again=nn.Module())
    model.again.weight = model.attention.in_proj_weight
    assert not [name for name in chosen(model) if name.startswith("attention")]


def test_blocks_that_are_all_tied_to_others_are_layers_still() -> None:
    """As where an encoder and a decoder share every weight: the root owns them, and the blocks are called as ever."""
    model = built(lambda: Stack(Block(7), Block(7)))
    for name in ("up", "down"):
        for kind in ("weight", "bias"):
            setattr(getattr(model.blocks[1], name), kind, getattr(getattr(model.blocks[0], name), kind))
    assert {"blocks.0", "blocks.1"} < set(chosen(model))
    train(zero3.shard(model), Turn(0, 0, 1))


# -- full-size models of transformers, without memory

FULL = {
    "gemma3n": lambda: t.Gemma3nForCausalLM(t.Gemma3nTextConfig()),  # an embedding for each layer, 43 % of it
    "blt": lambda: t.BltForCausalLM(t.BltConfig()),  # embeddings of hashes, 72 %
    "llava": lambda: t.LlavaForConditionalGeneration(t.LlavaConfig()),
    "mllama": lambda: t.MllamaForConditionalGeneration(t.MllamaConfig()),
    "Qwen2.5-VL": lambda: t.Qwen2_5_VLForConditionalGeneration(t.Qwen2_5_VLConfig()),
    "GLM-4V": lambda: t.Glm4vForConditionalGeneration(t.Glm4vConfig()),
    "Whisper": lambda: t.WhisperForConditionalGeneration(t.WhisperConfig(tie_word_embeddings=False)),
}


@pytest.mark.parametrize("name", FULL)
def test_the_root_of_a_full_size_model(name: str) -> None:
    with torch.device("meta"):
        model = FULL[name]()
    root, largest = root_and_largest(model)
    assert root <= largest, f"{root / 1e6:.1f} M elements, the largest layer {largest / 1e6:.1f} M"


def test_the_warning_of_a_large_root_names_what_is_tied(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zero3"):
        zero3.shard(built(lambda: Stack(Block(7), tied=True, words=1000)))
    assert "embed.weight" in caplog.text
