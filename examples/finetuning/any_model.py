"""The other way: any causal language model, sharded in place by `zero3.shard`, with LoRA adapters if they are wanted."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import zero3

from .causal_lm import choose_trainable, empty, new_model
from .ranks import Ranks
from .report import memory_of_one_process

__all__ = ["AnyModel"]


class AnyModel:
    """A `CausalLM` of any class. No rank ever holds all of it: each reads its own slices from the directory."""

    def __init__(self, options: argparse.Namespace, config: PreTrainedConfig, ranks: Ranks) -> None:
        with nullcontext() if options.model is None and ranks.rank == 0 else empty():
            model = new_model(config, options.dtype)
        if options.lora is None:
            choose_trainable(model, options.train)
        else:
            model = add_adapters(model, options.lora)
        self.memory_of_one_process = memory_of_one_process(model)
        self._first = ranks.rank == 0
        self.sharded = zero3.shard(model, device=ranks.device, policy=options.policy)
        if options.model is not None:
            try:
                zero3.load_pretrained(self.sharded, options.model)
            except ValueError as error:
                raise SystemExit(f"--model {options.model}: {error}") from None

    def logits(self, tokens: Tensor) -> Tensor:
        return self.sharded(input_ids=tokens, use_cache=False).logits

    def generate(self, tokens: Tensor, count: int, window: int) -> Tensor:
        """As `transformers` does it, with its cache of keys and values, so no `window` is needed."""
        with zero3.resident(self.sharded):  # every layer stays whole: nothing is gathered again for every token
            everything = torch.ones_like(tokens)
            return self.sharded.generate(input_ids=tokens, attention_mask=everything, max_new_tokens=count, do_sample=False, num_beams=1)

    def save(self, directory: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        zero3.save_pretrained(self.sharded, directory)  # of a model with adapters: the adapters
        if self._first:
            tokenizer.save_pretrained(directory)


def add_adapters(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """LoRA on every linear layer but the readout. Adapters are float32, and all that is trained; the rest is frozen."""
    try:
        import peft  # here, for its import takes seconds
    except ModuleNotFoundError as missing:
        raise SystemExit(f"--lora needs the package {missing.name!r}: pip install 'zero3[examples]' brings it") from None
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type=peft.TaskType.CAUSAL_LM)
    model = peft.get_peft_model(model, config)
    for module in model.modules():  # peft leaves adapters as empty as the model: they get their values here
        if isinstance(module, peft.tuners.lora.LoraLayer):
            module.lora_A.to_empty(device="cpu")
            module.lora_B.to_empty(device="cpu")
            module.reset_lora_parameters("default", init_lora_weights=True)
    return model
