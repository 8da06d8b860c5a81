"""The first way: a GPT-NeoX model cut by hand into the layers of a `Zero3Sequential`, and put together when it is saved.

    tokens -> Embedding -> Block -> ... -> Block -> Readout -> logits

What travels between them is the hidden states and the rotary position embeddings, which are the same for every block.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerBase
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

import zero3

from .causal_lm import choose_trainable, empty, new_model, save_model
from .ranks import Ranks
from .report import memory_of_one_process

__all__ = ["NeoX", "small_config"]

Hidden = tuple[Tensor, tuple[Tensor, Tensor]]  # hidden states [batch, length, width]; cosines and sines of the positions


class NeoX:
    """A `CausalLM` in layers. Only rank 0 reads the weights; it deals them out while the layers are wrapped."""

    def __init__(self, options: argparse.Namespace, config: GPTNeoXConfig, ranks: Ranks) -> None:
        check_untied(options.model, config)
        config._attn_implementation = "sdpa"  # causal without being given a mask
        if ranks.rank == 0 and options.model is not None:
            whole = GPTNeoXForCausalLM.from_pretrained(options.model, config=config, dtype=options.dtype)
        else:
            with nullcontext() if ranks.rank == 0 else empty():
                whole = new_model(config, options.dtype)
        choose_trainable(whole, options.train)
        self.memory_of_one_process = memory_of_one_process(whole)
        layers = cut_into_layers(whole)
        self._names = hugging_face_names(whole, layers)
        self._source = options.model
        self._config = config
        # From here on, every rank holds its slice of each layer, and a whole layer only while that layer computes.
        inner = replace(options.policy, output_dtype=None)  # what goes from layer to layer stays as it is computed
        policies = [*(inner for _ in layers[1:]), options.policy]
        self.sharded = zero3.Zero3Sequential(
            [zero3.Zero3Layer(layer, device=ranks.device, policy=policy) for layer, policy in zip(layers, policies, strict=True)]
        )

    def logits(self, tokens: Tensor) -> Tensor:
        return self.sharded(tokens)

    def generate(self, tokens: Tensor, count: int, window: int) -> Tensor:
        """The likeliest next token, again and again. All ranks do the same, for every layer is on all of them."""
        for _ in range(count):
            tokens = torch.cat([tokens, self.logits(tokens[:, -window:])[:, -1:].argmax(-1)], dim=1)
        return tokens

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        state = zero3.full_state_dict(self.sharded)  # the whole model in rank 0's host memory; {} on the others
        if state:
            state = {self._names[name]: value for name, value in state.items()}
            save_model(directory, self._config, state, tokenizer, self._source)


def check_untied(directory: Path | None, config: GPTNeoXConfig) -> None:
    if config.tie_word_embeddings:
        raise SystemExit(
            f"--model {directory}: tie_word_embeddings is true, so the embedding and the readout share one matrix, but in a "
            "sequence they are two layers. Pass --shard; or untie them: set it to false, and save a copy of the matrix as lm_head.weight"
        )


class Embedding(nn.Module):
    """Tokens `[batch, length]` to hidden states, and their positions to rotary embeddings."""

    def __init__(self, model: GPTNeoXForCausalLM) -> None:
        super().__init__()
        self.embed_in = model.gpt_neox.embed_in
        self.emb_dropout = model.gpt_neox.emb_dropout
        self.rotary_emb = model.gpt_neox.rotary_emb

    def forward(self, tokens: Tensor) -> Hidden:
        hidden = self.emb_dropout(self.embed_in(tokens))
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        return hidden, self.rotary_emb(hidden, positions)


class Block(nn.Module):
    """One transformer block. Windows have no padding, so the attention needs no mask: it is causal by itself."""

    def __init__(self, block: GPTNeoXLayer) -> None:
        super().__init__()
        self.block = block

    def forward(self, state: Hidden) -> Hidden:
        hidden, rotary = state
        made = self.block(hidden, position_embeddings=rotary)
        return made[0] if isinstance(made, tuple) else made, rotary  # a tuple, in older transformers


class Readout(nn.Module):
    """Hidden states to logits `[batch, length, vocabulary]`."""

    def __init__(self, model: GPTNeoXForCausalLM) -> None:
        super().__init__()
        self.final_layer_norm = model.gpt_neox.final_layer_norm
        self.lm_head = model.get_output_embeddings()  # `embed_out`, in older transformers

    def forward(self, state: Hidden) -> Tensor:
        return self.lm_head(self.final_layer_norm(state[0]))


def cut_into_layers(model: GPTNeoXForCausalLM) -> list[nn.Module]:
    return [Embedding(model), *(Block(block) for block in model.gpt_neox.layers), Readout(model)]


def hugging_face_names(model: GPTNeoXForCausalLM, layers: list[nn.Module]) -> dict[str, str]:
    """From the names in a sequence of `layers` (`1.block.mlp...`) to those in `model` (`gpt_neox.layers.0.mlp...`)."""
    own_names = {parameter: name for name, parameter in model.named_parameters()}
    return {name: own_names[parameter] for name, parameter in nn.Sequential(*layers).named_parameters()}


def small_config(vocabulary: int, width: int, blocks: int, heads: int) -> GPTNeoXConfig:
    """A GPT-NeoX that two CPU cores can train. Token 0 is the tokenizer's end of text."""
    return GPTNeoXConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
