"""Sharded in place, models of every shape train as before: ties, shared and inner blocks, any outputs, any order of calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

import zero3
from tests.core import test_paths as paths
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Build, Program, by_shard, check_parity
from tests.support.stacks import WIDTH, Block, Stack, built, train

worlds = pytest.mark.parametrize("world_size", [1, 3])  # two are seen in `test_layers_inside_of_layers`, and everywhere else


def inner_too(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    """Blocks, and linear maps in them, as layers in layers."""
    return zero3.shard(model, [Block, nn.Linear, nn.Embedding], process_group=group, policy=policy)


class Tower(Stack):
    """A stack from vectors to vectors, for programs that know no words; the root's own layer begins and ends it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.through_blocks(self.norm(x)))


@worlds
@pytest.mark.parametrize(
    "program",
    [
        paths.summed,
        paths.first_backward_first,
        paths.last_backward_first,
        paths.fed_back,
        paths.forward_without_backward,
        paths.evaluation_between_forward_and_backward,
        paths.retain_graph_twice,
        paths.gradient_of_the_input,
        paths.accumulated,
    ],
)
def test_forwards_and_backwards_may_come_in_any_order(world_size: int, program: Program) -> None:
    check_parity(lambda: built(lambda: Tower(Block(7), Block(3))), program, world_size=world_size, shard=by_shard)


# -- blocks that take and return anything


@dataclass
class Answer:
    hidden: Tensor
    notes: tuple[int, ...]


class Gated(Block):
    """Positional and keyword arguments, some of them no tensors."""

    def forward(self, x: Tensor, *, gate: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = super().forward(x) * gate * scale
        return y if mask is None else y * mask


def result_of(wrap: Callable[[Tensor], Any], unwrap: Callable[[Any], Tensor]) -> Build:
    class Answering(Block):
        def forward(self, x: Tensor) -> Any:
            return wrap(super().forward(x))

    class Asking(Stack):
        def through_blocks(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = unwrap(block(x))
            return x

    return lambda: Asking(Answering(), Answering(3))


class WithArguments(Stack):
    def through_blocks(self, x: Tensor) -> Tensor:
        gate, mask = torch.sigmoid(self.norm(x)), x > 0
        for block in self.blocks:
            x = block(x, gate=gate, mask=mask, scale=0.5) + block(x=x, gate=gate)
        return x


class OfKinds(Stack):
    """Reads what its blocks are, as models with several kinds of attention do."""

    def through_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if block.kind == "full" else block(x.flip(1))
            assert block.up.in_features == WIDTH and len(block.kinds) == 2
        return x


class Reversed(Block):
    kind = "reversed"


def of_kinds() -> Stack:
    model = OfKinds(Block(), Reversed(3))
    for block in model.blocks:
        block.kinds = ["full", "reversed"]
    return model


def shared_block() -> Stack:
    """One module in two places, and once more by another name."""
    first, second = Block(3), Block(4)
    model = Stack(first, second, first)
    model.favourite = second
    return model


def shared_part() -> Stack:
    """A module inside of two blocks, a parameter in two blocks, and one in a block and the root."""
    model = Stack(Block(7), Block(7), Block(7))
    model.blocks[1].up = model.blocks[0].up
    model.blocks[2].down.weight = model.blocks[0].down.weight
    model.norm.weight = model.blocks[2].down.bias
    return model


def tied_twice() -> Stack:
    """The embedding, the head and a block's map are one weight."""
    model = Stack(Block(), Block(23), tied=True)
    model.blocks[1].up.weight = model.embed.weight
    return model


class EncoderAndDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(Block(3), Block(4)), Stack(Reversed(3), Reversed(5))
        self.decoder.embed = self.encoder.embed

    def forward(self, words: Tensor) -> Tensor:
        memory = self.encoder.through_blocks(self.encoder.embed(words))
        x = self.decoder.embed(words.flip(1))
        for block in self.decoder.blocks:
            x = block(x + memory)
        return self.decoder.head(self.decoder.norm(x))


class Skipping(Stack):
    """Blocks without gradients at first, a frozen one, one that nothing is done with."""

    def through_blocks(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        x = self.blocks[1](x)
        self.blocks[2](x)
        return x


def skipping() -> Stack:
    model = Skipping(*[Block(5) for _ in range(4)])
    model.blocks[1].requires_grad_(False)
    return model


def biases() -> Stack:
    """Every module has a frozen and a trainable parameter, so two chunks take turns in it."""
    model = Stack(Block(), Block(3), tied=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


class Checkpointing(Stack):
    """Recomputes two blocks and the root's own norm between them."""

    use_reentrant = False

    def through_blocks(self, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            return self.blocks[1](self.norm(self.blocks[0](x)))

        return self.blocks[2](checkpoint(part, x, use_reentrant=self.use_reentrant))


class CheckpointingReentrantly(Checkpointing):
    use_reentrant = True


MODELS: dict[str, Build] = {
    "tied": lambda: Stack(Block(), Block(3), tied=True),
    "tied thrice, also in a block": tied_twice,
    "shared blocks": shared_block,
    "shared parts of blocks": shared_part,
    "an encoder and a decoder": EncoderAndDecoder,
    "tuples": result_of(lambda y: (y, None, 3), lambda answer: answer[0]),
    "dataclasses": result_of(lambda y: Answer(y, (1, 2)), lambda answer: answer.hidden),
    "model outputs": result_of(lambda y: BaseModelOutput(last_hidden_state=y), lambda answer: answer.last_hidden_state),
    "nested dicts": result_of(lambda y: {"a": [{"y": y}, y * 2]}, lambda answer: answer["a"][0]["y"] + answer["a"][1]),
    "arguments": lambda: WithArguments(Gated(), Gated(3)),
    "kinds of blocks": of_kinds,
    "blocks without gradients": skipping,
    "only biases are trained": biases,
    "checkpoints over blocks": lambda: Checkpointing(Block(), Block(3), Block(4)),
    "reentrant checkpoints over blocks": lambda: CheckpointingReentrantly(Block(), Block(3), Block(4)),
}


@worlds
@pytest.mark.parametrize("name", MODELS)
def test_models_of_any_shape_train_as_before(world_size: int, name: str) -> None:
    check_parity(lambda: built(MODELS[name]), train, world_size=world_size, shard=by_shard)


@pytest.mark.parametrize("name", MODELS)
def test_layers_inside_of_layers(name: str) -> None:
    check_parity(lambda: built(MODELS[name]), train, shard=inner_too)


SHARED = [
    "tied",
    "tied thrice, also in a block",
    "shared blocks",
    "shared parts of blocks",
    "an encoder and a decoder",
    "only biases are trained",
]


@pytest.mark.parametrize("name", SHARED)
def test_what_is_tied_has_one_owner_and_all_its_names(name: str) -> None:
    expected = built(MODELS[name]).state_dict()
    models = [built(MODELS[name]) for _ in range(2)]
    total = sum(parameter.numel() for parameter in models[0].parameters())

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = zero3.shard(models[group.rank], process_group=group)
        assert zero3.report(model).parameters == total
        saved = zero3.full_state_dict(model)
        zero3.load_full_state_dict(model, {key: value * 2 for key, value in saved.items()})
        with zero3.full_params(model):
            assert list(model.state_dict()) == list(expected)
        return zero3.full_state_dict(model)

    saved = run_ranks(2, body)[0]
    assert list(saved) == list(expected)
    assert all(torch.equal(saved[key], 2 * value) for key, value in expected.items())
