"""Parts of a sharded model called by themselves, its caches and hidden states, and calls that break in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.architectures import ARCHITECTURES, words
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Build, Program, Turn, assert_at_rest, by_shard, check_parity, detached
from tests.support.stacks import Block, Stack, built, loss_of, stack, train, words_of
from tests.test_shard_models import worlds


def encoder_alone(model: nn.Module, turn: Turn) -> Any:
    """Training through the encoder, a call of the whole with what it gave, and the encoder again."""
    ids, labels = words(turn), words(turn)
    memory = model.get_encoder()(ids).last_hidden_state
    memory.pow(2).mean().backward()
    output = model(encoder_outputs=model.get_encoder()(ids), labels=labels)
    output.loss.backward()
    with torch.no_grad():
        again = model.encoder(ids).last_hidden_state
    return memory, output.loss, output.logits, again


def inner_model_alone(model: nn.Module, turn: Turn) -> Any:
    hidden = model.model(words(turn)).last_hidden_state
    hidden.pow(2).mean().backward()
    return hidden, ARCHITECTURES["Llama"].loss(model, turn)


def caches(model: nn.Module, turn: Turn) -> Any:
    """A prompt, then a continuation with its keys and values: without gradients, and trained through."""
    prompt, more = words(turn), words(turn, 2, 3)
    model.eval()
    with torch.no_grad():
        first = model(prompt, use_cache=True)
        quiet = model(more, past_key_values=first.past_key_values, use_cache=True).logits
    model.train()
    first = model(prompt, use_cache=True)
    second = model(more, past_key_values=first.past_key_values, use_cache=True)
    (first.logits.pow(2).mean() + second.logits.pow(2).mean()).backward()
    return quiet, first.logits, second.logits


def hidden_states(model: nn.Module, turn: Turn) -> Any:
    output = model(words(turn), output_hidden_states=True, output_attentions=True)
    (output.logits.mean() + sum(state.pow(2).mean() for state in output.hidden_states)).backward()
    return output.hidden_states, output.attentions


def eager(name: str) -> Build:
    def build() -> nn.Module:
        model = ARCHITECTURES[name].build()
        model.set_attn_implementation("eager")
        return model

    return build


@worlds
@pytest.mark.parametrize(
    ("build", "program"),
    [
        pytest.param(ARCHITECTURES["T5"].build, encoder_alone, id="encoder"),
        pytest.param(ARCHITECTURES["Llama"].build, inner_model_alone, id="inner model"),
        pytest.param(ARCHITECTURES["Llama"].build, caches, id="caches"),
        pytest.param(ARCHITECTURES["GPT-2"].build, caches, id="caches of a tied model"),
        pytest.param(eager("Llama"), hidden_states, id="hidden states"),
    ],
)
def test_parts_and_extras_of_transformers(world_size: int, build: Build, program: Program) -> None:
    check_parity(build, program, world_size=world_size, shard=by_shard)


# -- failing in the middle


class Moody(Block):
    mood = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.mood == "forward":
            raise KeyError("forward")
        y = super().forward(x)
        if self.mood == "backward" and y.requires_grad:
            y.register_hook(self._refuse)
        return y

    def _refuse(self, gradient: Tensor) -> None:
        raise KeyError("backward")


@pytest.mark.parametrize("mood", ["forward", "backward"])
@worlds
def test_an_exception_leaves_no_trace(mood: str, world_size: int) -> None:
    def program(model: nn.Module, turn: Turn) -> Any:
        if turn.step == 1 and zero3.is_sharded(model):  # the plain model has nothing to recover from
            model.blocks[1].module.mood = mood
            with pytest.raises(KeyError, match=mood):
                train(model, turn)
            model.blocks[1].module.mood = ""
            model.zero_grad()
        return train(model, turn)

    check_parity(lambda: built(lambda: Stack(Block(), Moody(3), Block())), program, world_size=world_size, shard=by_shard, steps=3)


def test_no_grad_and_inference_mode_leave_nothing_fetched() -> None:
    models = [stack() for _ in range(2)]

    def body(group: ThreadCommunicator) -> list[Tensor]:
        model = zero3.shard(models[group.rank], process_group=group).eval()
        with torch.no_grad():
            scores = model(words_of(Turn(0, 0, 1)))
        assert_at_rest(model)
        with torch.inference_mode():
            loss_of(model, Turn(0, 0, 1))
        assert_at_rest(model)
        return detached(scores)

    expected = stack()(words_of(Turn(0, 0, 1)))
    assert all(torch.allclose(scores[0], expected, rtol=1e-12) for scores in run_ranks(2, body))
