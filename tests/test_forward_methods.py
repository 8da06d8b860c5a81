"""Methods other than forward: registered ones, and those that only call submodules, against the unsharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import zero3
from tests.support import processes
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import TOLERANCE, Turn, assert_at_rest, assert_close, check_parity, process_group
from tests.support.stacks import WIDTH, WORDS, Block, Stack, built, words_of


class TwoWays(Stack):
    """Its methods read parameters of the root's own, of a layer, or none themselves."""

    def __init__(self) -> None:
        super().__init__(Widened(7), Widened(8), Block(9))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def encode(self, words: Tensor) -> Tensor:
        """Only calls submodules."""
        return self.norm(self.through_blocks(self.embed(words)))

    def scaled(self, words: Tensor) -> Tensor:
        return self.encode(words) * self.scale

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.scaled(words))


class Widened(Block):
    def features(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.up.weight.T)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.features(x))


def registered(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
    model = zero3.shard(model, process_group=group, policy=policy)
    zero3.register_forward_method(model, "scaled")
    zero3.register_forward_method(model.blocks[0], "features")
    zero3.register_forward_method(model.blocks[1], "features")
    return model


def by_methods(model: Any, turn: Turn) -> Any:
    """Twice by one method, once by another one, and as usual: four graphs before the backward."""
    words = words_of(turn)
    first, second = model.encode(words), model.encode(words.flip(0))
    scaled, features = model.scaled(words), [model.blocks[i].features(first) for i in range(2)]
    loss = (first * second).sum() + scaled.pow(2).sum() + sum(each.pow(2).sum() for each in features)
    loss = loss + cross_entropy(model(words).flatten(0, 1), turn.integers(WORDS, 2, 4).flatten())
    loss.backward()
    return [first, second, scaled, *features, loss]


@WORLDS
@pytest.mark.parametrize("reshard", [True, False])
def test_register_forward_method_and_methods_of_submodules(world_size: int, reshard: bool) -> None:
    policy = zero3.ShardingPolicy(reshard_after_forward=reshard)
    check_parity(lambda: built(TwoWays), by_methods, world_size=world_size, shard=registered, policy=policy, steps=3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_register_forward_method_of_a_lone_layer(world_size: int) -> None:
    def shard(model: nn.Module, group: Any, policy: zero3.ShardingPolicy) -> nn.Module:
        layer = zero3.Zero3Layer(model, process_group=group, policy=policy)
        zero3.register_forward_method(layer, "features")
        return layer

    def program(model: Any, turn: Turn) -> Tensor:
        found = model.features(turn.tensor(3, WIDTH))
        found.pow(2).sum().backward()
        return found

    check_parity(lambda: built(lambda: Widened(7)), program, world_size=world_size, shard=shard)


def clip() -> Any:
    text = {"vocab_size": 30, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    config = t.CLIPConfig(
        text_config={**text, "eos_token_id": 2, "bos_token_id": 1, "max_position_embeddings": 16}, vision_config=vision, projection_dim=6
    )
    return built(lambda: t.CLIPModel(config))


def contrast(model: Any, turn: Turn) -> list[Tensor]:
    """As people train CLIP with a loss of their own."""
    images = model.get_image_features(turn.tensor(3, 3, 8, 8)).pooler_output
    texts = model.get_text_features(turn.integers(25, 3, 5) + 3).pooler_output
    loss = cross_entropy(images @ texts.T, torch.arange(3))
    loss.backward()
    return [images, texts, loss]


@WORLDS
def test_get_image_features_of_a_transformers_model_needs_no_register_forward_method(world_size: int) -> None:
    check_parity(clip, contrast, world_size=world_size, shard=lambda model, group, policy: zero3.shard(model, process_group=group))


def test_register_forward_method_names_what_is_wrong() -> None:
    model = zero3.shard(built(TwoWays))
    with pytest.raises(ValueError, match="TwoWays has no method 'decode'"):
        zero3.register_forward_method(model, "decode")
    with pytest.raises(ValueError, match="lies inside a layer"):
        zero3.register_forward_method(model.blocks[0].up, "extra_repr")
    with pytest.raises(ValueError, match="nothing in this Linear is sharded"):
        zero3.register_forward_method(nn.Linear(2, 2), "extra_repr")


def test_a_method_that_was_not_registered_names_the_parameter() -> None:
    models = [built(TwoWays) for _ in range(2)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=process_group(group))
        with pytest.raises(RuntimeError, match=r"'scale' of layer the root .* is released.*register_forward_method"):
            model.scaled(words_of(Turn(0, 0, 1)))
        model(words_of(Turn(0, 0, 1))).sum().backward()
        assert_at_rest(model)

    run_ranks(2, body)


def on_a_process(rank: processes.Rank) -> list[Tensor]:
    return [each.detach() for each in by_methods(registered(built(TwoWays), None, zero3.ShardingPolicy()), Turn(rank.number, 0, 2))]


def test_register_forward_method_on_processes() -> None:
    plain = built(TwoWays)
    for number, found in enumerate(processes.on_ranks(2, on_a_process)):
        assert_close(found, by_methods(plain, Turn(number, 0, 2)), TOLERANCE, f"rank {number}")
