"""A layer and the module that it wraps are one to all who walk over the model: flags, modes, hooks, buffers, states."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.reference import Turn
from tests.support.stacks import WIDTH, WORDS, Block, Stack, built, loss_of, stack, train, words_of

EVERYTHING = (nn.Embedding, Block, nn.LayerNorm, nn.Linear)  # matches inside matches become inner layers


class Scaled(Block):
    """A block with a flag, a buffer, a parameter and a state of its own, which is never in training mode."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("offset", torch.full((WIDTH,), 0.5))
        self.register_buffer("fleeting", torch.zeros(WIDTH), persistent=False)
        self.note = "fresh"

    def forward(self, x: Tensor) -> Tensor:
        assert not self.training
        return super().forward(x * self.gain) * self.factor + self.offset + self.fleeting

    def train(self, mode: bool = True) -> Scaled:
        super().train(False)
        return self

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


def scaled() -> Stack:
    return built(lambda: Stack(Scaled(), Scaled(), Block())).train()


def test_a_flag_that_is_set_at_all_blocks_reaches_them() -> None:
    plain, model = scaled(), zero3.shard(scaled(), Block)
    for each in (plain, model):
        for module in each.modules():
            if isinstance(module, Scaled):
                module.factor = 3.0
                module.said_by_nobody = True  # type: ignore[assignment]
                module.fleeting = torch.ones(WIDTH, dtype=torch.float64)
    assert loss_of(model, Turn(0, 0, 1)).item() == pytest.approx(loss_of(plain, Turn(0, 0, 1)).item(), rel=1e-12)
    assert [vars(layer.module).get("said_by_nobody") for layer in model.blocks] == [True, True, None]  # type: ignore[union-attr]


def test_a_flag_reaches_the_blocks_of_layers_that_the_caller_puts_into_a_model() -> None:
    model: Any = scaled()
    for place, block in enumerate(list(model.blocks)):
        model.blocks[place] = zero3.Zero3Layer(block)
        model.blocks[place].factor = 3.0
    assert [block.module.factor for block in model.blocks] == [3.0] * 3


def test_train_and_eval_are_those_of_the_module() -> None:
    model = zero3.shard(scaled(), Block)
    for mode in (True, False):
        model.train(mode)
        assert [layer.training for layer in model.blocks] == [False, False, mode]
        assert [layer.module.training for layer in model.blocks] == [False, False, mode]  # type: ignore[union-attr]
    model.blocks[2].training = True
    assert model.blocks[2].module.training  # type: ignore[union-attr]


def test_register_forward_hook_on_a_layer_and_on_its_module_fire_once_each() -> None:
    model: Any = stack()
    fired: list[str] = []
    model.blocks[0].register_forward_hook(lambda module, *_: fired.append(f"before, {type(module).__name__}"))
    zero3.shard(model)
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_hook(lambda module, *_: fired.append(f"after, {type(module).__name__}"))
    train(model, Turn(0, 0, 1))
    assert fired == ["before, Block", *["after, Zero3Layer"] * 3]


def test_state_dict_and_load_state_dict_inside_full_params_are_those_of_the_unsharded_model() -> None:
    """Parameters and buffers of a layer's own module, extra states, and hooks of state dicts."""

    def changed(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        state[f"{prefix}added"] = torch.ones(1)

    plain, model = scaled(), scaled()
    for each in (plain, model):
        each.blocks[1]._register_state_dict_hook(changed)
    zero3.shard(model, EVERYTHING)
    model.blocks[0].note, plain.blocks[0].note = "later", "later"
    saved = plain.state_dict()
    with zero3.full_params(model):
        found = model.state_dict()
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(found) == list(saved) and "blocks.1.added" in found and found["blocks.0._extra_state"] == "later"
    assert all(torch.equal(found[name], value) for name, value in saved.items() if isinstance(value, Tensor))
    assert [name for name, _ in model.named_buffers()] == [name for name, _ in plain.named_buffers()]
    other = built(lambda: Stack(Scaled(), Scaled(), Block())).train()
    for parameter in other.parameters():
        parameter.data.zero_()
    zero3.shard(other, EVERYTHING)
    del saved["blocks.1.added"]
    with zero3.full_params(other, writeback=True):
        other.load_state_dict(saved)
    assert loss_of(other, Turn(0, 0, 1)).item() == loss_of(model, Turn(0, 0, 1)).item() and other.blocks[0].note == "later"


def test_functional_call_replaces_a_parameter_of_the_layers_own_module() -> None:
    plain, model = stack(), zero3.shard(stack(), EVERYTHING)
    words, weight = words_of(Turn(0, 0, 1)), torch.ones(WORDS, WIDTH, dtype=torch.float64)
    expected = torch.func.functional_call(plain, {"head.weight": weight}, words)
    with zero3.resident(model):
        found = torch.func.functional_call(model, {"head.weight": weight}, words)
        assert torch.equal(found, expected) and not torch.equal(model(words), expected)


def test_double_of_a_sharded_model_changes_nothing_before_it_raises() -> None:
    """Parameters that a layer's own module has are looked at too."""
    model = built(lambda: Stack(Scaled(), Block())).float()
    zero3.shard(model, (nn.Embedding, nn.Linear, nn.LayerNorm, Scaled))
    with pytest.raises(RuntimeError, match=r"converting .* of a sharded model"):
        model.double()
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}


def test_a_buffer_that_is_registered_at_a_layer_is_the_modules() -> None:
    model: Any = zero3.shard(stack(), Block)
    model.blocks[0].register_buffer("seen", torch.zeros(1))
    assert model.blocks[0].module.seen is model.blocks[0].seen is dict(model.named_buffers())["blocks.0.seen"]


def test_the_module_of_a_layer_can_not_be_replaced() -> None:
    model: Any = zero3.shard(stack(), Block)
    with pytest.raises(AttributeError, match="the module of this Zero3Layer stays the one"):
        model.blocks[0].module = nn.Tanh()
    assert type(model.blocks[0].module) is Block


def test_what_was_set_through_a_layer_can_be_deleted() -> None:
    model: Any = zero3.shard(scaled(), Block)
    layer = model.blocks[0]
    with mock.patch.object(layer, "factor", 2.0):
        assert layer.module.factor == 2.0
    assert layer.factor == layer.module.factor == 1.0
    layer.flag = 3
    del layer.flag
    assert not hasattr(layer, "flag") and "flag" not in vars(layer.module)
    with pytest.raises(AttributeError, match="flag"):
        del layer.flag


class Streaming(Block):
    """It has attributes of the names that a layer's own have."""

    def __init__(self) -> None:
        super().__init__()
        self._state: Any = "old"
        self._listed = 0


def test_a_block_may_have_attributes_of_a_layers_names() -> None:
    plain, model = (built(lambda: Stack(Streaming(), Block())) for _ in range(2))
    zero3.shard(model, Block)
    for each in (plain, model):
        for module in each.modules():
            if isinstance(module, Streaming):
                module._state = None
    assert model.blocks[0].module._state is None  # type: ignore[union-attr]
    assert loss_of(model, Turn(0, 0, 1)).item() == pytest.approx(loss_of(plain, Turn(0, 0, 1)).item(), rel=1e-12)
    unsharded = torch.compile(built(Streaming), backend="eager", fullgraph=True)
    assert unsharded(torch.zeros(1, WIDTH, dtype=torch.float64)).shape == (1, WIDTH)
