"""A GPT-NeoX model of `transformers`, cut into the layers of a sequence, and put together again when it is saved.

    tokens -> Embedding -> Block -> ... -> Block -> Readout -> logits

What travels between them is the hidden states and the rotary position embeddings, which are the same for every block.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerBase
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer

__all__ = ["build_model", "choose_trainable", "cut_into_layers", "hugging_face_names", "load_config", "save_model", "small_config"]

Hidden = tuple[Tensor, tuple[Tensor, Tensor]]  # hidden states [batch, length, width]; cosines and sines of the positions


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
        return self.block(hidden, position_embeddings=rotary), rotary


class Readout(nn.Module):
    """Hidden states to logits `[batch, length, vocabulary]`."""

    def __init__(self, model: GPTNeoXForCausalLM) -> None:
        super().__init__()
        self.final_layer_norm = model.gpt_neox.final_layer_norm
        self.lm_head = model.lm_head

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


def load_config(directory: Path) -> GPTNeoXConfig:
    """The configuration of a Hugging Face directory, if the example can train such a model."""
    if not (directory / "config.json").is_file():
        raise SystemExit(f"--model {directory}: there is no config.json in it")
    config = AutoConfig.from_pretrained(directory, attn_implementation="sdpa")
    if not isinstance(config, GPTNeoXConfig):
        raise SystemExit(f"--model {directory}: this example cuts 'gpt_neox' models into layers, not {config.model_type!r}")
    if config.tie_word_embeddings:
        raise SystemExit(
            f"--model {directory}: tie_word_embeddings is true, so the embedding and the readout share one matrix, but here "
            "they are two layers. Untie them: set it to false, and save a copy of the matrix as lm_head.weight"
        )
    return config


def build_model(config: GPTNeoXConfig, directory: Path | None, *, empty: bool) -> GPTNeoXForCausalLM:
    """A model in float32: read from `directory`, or with fresh weights, or `empty`, which needs no memory at all.

    Only rank 0 needs weights. It deals them out while the layers are wrapped.
    """
    if empty:
        with torch.device("meta"):
            return GPTNeoXForCausalLM(config)
    if directory is None:
        return GPTNeoXForCausalLM(config)
    return GPTNeoXForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)


def choose_trainable(model: GPTNeoXForCausalLM, choice: str) -> None:
    """Freezes all but the choice: "all", "biases", or "last-N", the last N blocks and the readout."""
    trainable: list[nn.Parameter]
    if choice == "all":
        trainable = list(model.parameters())
    elif choice == "biases":
        trainable = [parameter for name, parameter in model.named_parameters() if name.endswith(".bias")]
    else:
        blocks = model.gpt_neox.layers
        count = int(choice.removeprefix("last-"))
        if count > len(blocks):
            raise SystemExit(f"--train {choice}: the model has only {len(blocks)} blocks")
        modules = [*blocks[len(blocks) - count :], model.gpt_neox.final_layer_norm, model.lm_head]
        trainable = [parameter for module in modules for parameter in module.parameters()]
    model.requires_grad_(False)
    for parameter in trainable:
        parameter.requires_grad_(True)


def save_model(directory: Path, config: GPTNeoXConfig, tokenizer: PreTrainedTokenizerBase, state: dict[str, Tensor]) -> None:
    """A directory that `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained` read."""
    directory.mkdir(parents=True, exist_ok=True)
    config.architectures = [GPTNeoXForCausalLM.__name__]
    config.dtype = torch.float32
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
