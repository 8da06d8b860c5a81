"""shard(): which modules become layers, what stays as it was, what is refused, what is said."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.architectures import ARCHITECTURES
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import assert_at_rest, check_parity
from tests.support.stacks import WIDTH, Block, Stack, built, stack, train


def wrapped(model: nn.Module) -> dict[str, str]:
    """The names of the layers, with the classes of what they wrap."""
    return {name: type(module.module).__name__ for name, module in model.named_modules() if isinstance(module, zero3.Zero3Layer)}


BLOCKS = {f"blocks.{i}": "Block" for i in range(3)}


CHOICES: dict[str, tuple[Callable[[nn.Module], Any], dict[str, str]]] = {
    "nothing said": (lambda m: None, {"embed": "Embedding", **BLOCKS, "head": "Linear"}),
    "a class": (lambda m: Block, BLOCKS),
    "classes": (lambda m: [Block, nn.Embedding], {"embed": "Embedding", **BLOCKS}),
    "modules": (lambda m: list(m.blocks[1:]), {"blocks.1": "Block", "blocks.2": "Block"}),
    "a module": (lambda m: m.blocks[1], {"blocks.1": "Block"}),
    "a class and a module": (lambda m: (Block, m.norm), {**BLOCKS, "norm": "LayerNorm"}),
    "a generator": (lambda m: (b for b in m.blocks), BLOCKS),
    "a predicate": (lambda m: lambda name, module: name.endswith("2") or name == "head", {"blocks.2": "Block", "head": "Linear"}),
    "a match inside a match": (
        lambda m: lambda name, module: name in ("blocks.1", "blocks.1.up", "blocks.2.down"),
        {"blocks.1": "Block", "blocks.1.up": "Linear", "blocks.2.down": "Linear"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_are_what_was_chosen(choice: str, world_size: int) -> None:
    choose, expected = CHOICES[choice]

    def in_place(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
        zero3.shard(model, choose(model), process_group=group, policy=policy)
        assert wrapped(model) == expected
        return model

    check_parity(stack, train, world_size=world_size, shard=in_place)


def test_nested_lists_count_once() -> None:
    """Of lists in lists, the outermost are the blocks."""

    def make() -> nn.Module:
        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.experts = nn.ModuleList([Block(3), Block(5)])

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.experts[0](x) + self.experts[1](x)

        return Stack(Experts(), Experts())

    model = zero3.shard(built(make))
    assert [name for name in wrapped(model) if name.startswith("blocks")] == ["blocks.0", "blocks.1"]


def test_short_lists_stay_in_the_root() -> None:
    model = stack()
    model.extra = nn.ModuleList([nn.Linear(2, 1)])
    assert "extra.0" not in wrapped(zero3.shard(model))


def test_a_head_is_a_layer_though_its_bias_is_tied() -> None:
    model = stack()
    model.head = nn.Linear(WIDTH, 23, dtype=torch.float64)
    model.head_bias = model.head.bias
    zero3.shard(model)
    assert wrapped(model)["head"] == "Linear"
    assert model._zero3_root.parameters[0].sites.name == "head_bias"
    assert_at_rest(model)


def test_the_model_is_the_same_object_and_class() -> None:
    llama = ARCHITECTURES["Llama"].build()
    kind, config, names = type(llama), llama.config, [name for name, _ in llama.named_modules()]
    decoder = llama.model
    model = zero3.shard(llama)
    assert model is llama and type(model) is kind and model.config is config and model.model is decoder
    assert isinstance(model, nn.Module) and callable(model.generate)
    assert [name for name, _ in model.named_modules()] == names
    assert model.model.layers[1].self_attn.head_dim == 8, "attributes of a block are read through its layer"
    assert model.get_input_embeddings().num_embeddings == 96
    assert model.num_parameters() > 0 and model.dtype is torch.float64 and model.device.type == "cpu"
    assert "Zero3Layer" in str(model) and "rank 0 of 1" in str(model)


# -- refused


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, type[Exception], str]] = {
    "no list": (lambda: nn.Sequential(nn.Linear(2, 2)), None, ValueError, "no ModuleList of this Sequential.*layers="),
    "a list without parameters": (lambda: nn.Sequential(nn.ModuleList([nn.Tanh()])), None, ValueError, "no ModuleList"),
    "nothing matches": (stack, nn.Conv2d, ValueError, "Conv2d.*matches no submodule of this Stack, which has: Embedding, Block"),
    "the predicate matches nothing": (stack, lambda name, module: False, ValueError, "matches no submodule"),
    "a number": (stack, 3, TypeError, "found 3 of type int"),
    "a name": (stack, "blocks", TypeError, "found 'blocks' of type str"),
    "names": (stack, ["blocks.0"], TypeError, "holds 'blocks.0' of type str"),
    "another class": (stack, [dict], TypeError, "expected module classes or modules"),
    "a stranger": (stack, [nn.Linear(2, 2)], ValueError, "Linear that is no submodule"),
    "the list itself": (stack, nn.ModuleList, ValueError, "'blocks', a ModuleList: that is never called.*its elements"),
    "itself": (stack, Stack, ValueError, "matches no submodule"),
    "sharded already": (lambda: zero3.shard(stack()), None, ValueError, "this Stack is sharded already, or holds Zero3Layers"),
    "a layer inside": (lambda: nn.ModuleList([zero3.Zero3Layer(Block())]), None, ValueError, "holds Zero3Layers: shard a model once"),
    "no module": (lambda: 3, None, TypeError, "module must be a torch.nn.Module, found int"),
    "a layer": (lambda: zero3.Zero3Layer(Block()), None, ValueError, "holds Zero3Layers"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_sharded_is_refused(case: str) -> None:
    make, layers, error, text = REFUSED[case]
    with pytest.raises(error, match=f"(?s){text}"):
        zero3.shard(make(), layers)


def overlapping(model: Stack) -> None:
    model.blocks[1].up.weight = nn.Parameter(model.blocks[0].up.weight.detach()[:, :])


SPOILED: dict[str, tuple[Callable[[Stack], object], dict[str, Any], str]] = {
    "a subclass of Parameter": (
        lambda m: setattr(m.blocks[2].up, "weight", type("Quantised", (nn.Parameter,), {})(torch.zeros(9, WIDTH))),
        {},
        "'blocks.2.up.weight' is a Quantised",
    ),
    "another dtype": (lambda m: m.blocks[2].double(), {"dtype": torch.float32}, "'blocks.2.up.weight' is torch.float64, expected"),
    "one memory in two layers": (overlapping, {}, "'blocks.0.up.weight' and 'blocks.1.up.weight' overlap"),
    "another model": (lambda m: m.blocks.append(Block(4)), {}, "blocks.3"),
    "another rank": (lambda m: None, {"rank": 0}, "rank=0, but the process group says 1"),
    "another choice": (lambda m: None, {"layers": [Block]}, "ranks differ in what becomes a layer"),
    "another policy": (  # the field that differs, and no other
        lambda m: None,
        {"policy": zero3.ShardingPolicy(prefetch_depth=3)},
        r"rank 0: the root \(Stack\): policy {'prefetch_depth': \d}; rank 1: the root \(Stack\): policy {'prefetch_depth': 3}\. All ranks",
    ),
    "no choice": (lambda m: None, {"layers": 3}, "layers must be a module class"),
    "a predicate that raises": (lambda m: None, {"layers": lambda name, module: {}[name]}, "rank 1: KeyError: "),
    "a policy that raises": (lambda m: None, {"policy": lambda name, module: 1 // len(name)}, "rank 1: ZeroDivisionError"),
    "sharded already": (lambda m: zero3.Zero3Layer(m), {}, "rank 1: .*already"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_mistake_of_one_rank_is_raised_by_all_and_nothing_changes(case: str) -> None:
    spoil, arguments, text = SPOILED[case]
    models = [stack().float() for _ in range(2)]
    spoil(models[1])
    before = [list(model.parameters()) for model in models]

    def body(group: ThreadCommunicator) -> None:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=f"(?s){text}"):
            zero3.shard(models[group.rank], process_group=group, **(arguments if group.rank else {"dtype": arguments.get("dtype")}))

    run_ranks(2, body)
    assert not zero3.is_sharded(models[0])
    assert all(a is b for model, old in zip(models, before, strict=True) for a, b in zip(model.parameters(), old, strict=True))
    models[0](torch.zeros(1, 2, dtype=torch.long)).sum().backward()


def test_several_processes_need_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="init_process_group"):
        zero3.shard(stack())


# -- said


def test_one_line_says_what_became_what(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zero3"):
        zero3.shard(stack().float())
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "Stack: 1 x Embedding (each up to 0.0 MB), 3 x Block" in record.message and "1 x Linear" in record.message
    assert "in the root's own layer 0.0 MB (norm.weight, norm.bias)" in record.message


def test_a_root_larger_than_a_block_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "zero3"):
        zero3.shard(stack(tied=True, words=100_000))
    information, warning = caplog.records
    assert "in the root's own layer 4.0 MB (embed.weight" in information.message
    assert warning.levelno == logging.WARNING
    assert "holds 4.0 MB, more than the largest layer (0.0 MB)" in warning.message and "layers=" in warning.message


def test_only_rank_0_says_it(caplog: pytest.LogCaptureFixture) -> None:
    models = [stack() for _ in range(3)]
    with caplog.at_level(logging.INFO, "zero3"):
        run_ranks(3, lambda group: zero3.shard(models[group.rank], process_group=group) and None)
    assert len(caplog.records) == 1
