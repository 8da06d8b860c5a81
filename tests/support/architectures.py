"""Small models of many architectures, from their configs with random weights, the same at every call; and their inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers as t
from torch import Tensor, nn

from tests.support.reference import Turn

WORDS, LENGTH = 96, 8
_SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_FEW_KEYS = {**_SIZES, "num_key_value_heads": 1}
_NO_DROPOUT = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}


class Architecture(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: Callable[[Turn], dict[str, Tensor]]
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12

    def build(self) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().to(self.dtype)

    def loss(self, model: nn.Module, turn: Turn) -> Tensor:
        loss = model(**self.inputs(turn)).loss
        loss.backward()
        return loss


def _causal(config: t.PreTrainedConfig) -> Callable[[], nn.Module]:
    return lambda: t.AutoModelForCausalLM.from_config(copy.deepcopy(config))  # a model that is saved writes its dtype into its config


def words(turn: Turn, *shape: int) -> Tensor:
    """Word numbers `[2, LENGTH]`; the first ones may mean something to a model."""
    return turn.integers(WORDS - 3, *(shape or (2, LENGTH))) + 3


def _text(turn: Turn) -> dict[str, Tensor]:
    return {"input_ids": words(turn), "labels": words(turn)}


def _picture(turn: Turn) -> dict[str, Tensor]:
    return {"pixel_values": turn.tensor(2, 3, 8, 8), "labels": turn.integers(5, 2)}


def _sound(turn: Turn) -> dict[str, Tensor]:
    return {"input_features": turn.tensor(2, 8, 32), "labels": words(turn)}


def _vit() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 8, "patch_size": 4}
    return t.ViTForImageClassification(t.ViTConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=5))


def _whisper() -> nn.Module:
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    more = {"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32}
    tokens = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return t.WhisperForConditionalGeneration(t.WhisperConfig(**sizes, **more, **tokens, **_NO_DROPOUT))


def _t5() -> nn.Module:
    sizes = {"vocab_size": WORDS, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return t.T5ForConditionalGeneration(t.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=True))


def _gpt2() -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return _causal(t.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))()


ARCHITECTURES = {
    "GPT-NeoX": Architecture(_causal(t.GPTNeoXConfig(**_SIZES, hidden_dropout=0.0, attention_dropout=0.0)), _text),
    "Llama": Architecture(_causal(t.LlamaConfig(**_FEW_KEYS)), _text),
    "Qwen": Architecture(_causal(t.Qwen2Config(**_FEW_KEYS)), _text),
    "Gemma": Architecture(_causal(t.GemmaConfig(**_FEW_KEYS, head_dim=8)), _text),  # tied
    "GPT-2": Architecture(_gpt2, _text),  # tied, Conv1D
    # its experts' kernel knows no fp64
    "Mixtral": Architecture(_causal(t.MixtralConfig(**_FEW_KEYS, num_local_experts=4)), _text, torch.float32, 2e-6),
    "T5": Architecture(_t5, _text),  # an encoder and a decoder, one embedding for them and the head
    "BERT": Architecture(
        lambda: t.BertForMaskedLM(t.BertConfig(**_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)), _text
    ),
    "ViT": Architecture(_vit, _picture),
    "Whisper": Architecture(_whisper, _sound),
}
