"""Scenarios with Hugging Face's models: a training step, LoRA under checkpointing, generation inside `resident`, files in and out."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPTNeoXConfig, LlamaConfig

import zero3
from tests.device.scenarios import Scenario
from tests.device.training import Me, built, sgd, values
from zero3 import ShardingPolicy

HUGGING_FACE: dict[str, Scenario] = {}
WORDS = 40
_SIZES = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
LLAMA = LlamaConfig(**_SIZES, num_key_value_heads=1, pad_token_id=0)
NEOX = GPTNeoXConfig(**_SIZES, hidden_dropout=0.0, attention_dropout=0.0)


def scenario(function: Scenario) -> Scenario:
    HUGGING_FACE[function.__name__] = function
    return function


def plain(config: Any) -> nn.Module:
    return AutoModelForCausalLM.from_config(config)


def words(me: Me, step: int, length: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + me.rank)
    return torch.randint(1, WORDS, (2, length), generator=generator).to(me.device)


def sharded(me: Me, model: nn.Module, **policy: Any) -> nn.Module:
    return zero3.shard(model, device=me.device, process_group=me.group, policy=ShardingPolicy(**policy))


def train(model: Any, me: Me, steps: int = 2) -> list[Tensor]:
    optimizer, seen = sgd(model), []
    for step in range(steps):
        tokens = words(me, step)
        mask = (torch.arange(tokens.shape[1], device=me.device) < 6 + me.rank).expand_as(tokens).long()
        loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        loss.backward()
        seen += [loss.detach(), zero3.clip_grad_norm_(model, 1.0)]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def continued(model: Any, prompt: Tensor, more: int) -> Tensor:
    options = {"max_new_tokens": more, "do_sample": False, "eos_token_id": None}
    return model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **options)


@scenario
def a_llama_trains(me: Me) -> list[Tensor]:
    model = sharded(me, built(lambda: plain(LLAMA)))
    return [*train(model, me), *values(model)]


@scenario
def a_llama_trains_in_bf16(me: Me) -> list[Tensor]:
    model = sharded(me, built(lambda: plain(LLAMA)), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return [*train(model, me), *values(model)]


@scenario
def lora_with_checkpointing(me: Me) -> list[Tensor]:
    """A frozen base, adapters that peft puts into it, blocks that are recomputed. Then the base without its adapters, on all ranks."""

    def adapted() -> nn.Module:
        base = plain(LLAMA)
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
        return get_peft_model(
            base, LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
        )

    model: Any = sharded(me, built(adapted))
    model.train()
    seen = train(model, me)
    with torch.no_grad(), model.disable_adapter():
        seen.append(model(input_ids=words(me, 5)).logits)
    zero3.save_pretrained(model, me.directory / "adapters")
    saved = load_file(me.directory / "adapters" / "adapter_model.safetensors")
    return [*seen, *values(model), *(saved[name] for name in sorted(saved))]


@scenario
def generate_inside_resident(me: Me) -> list[Tensor]:
    """Between two steps; ranks have other prompts, and stop at other lengths."""
    model: Any = sharded(me, built(lambda: plain(LLAMA)))
    seen = train(model, me, 1)
    with zero3.resident(model), torch.no_grad():
        prompt = words(me, 7, 3 + me.rank)
        seen.append(
            model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4 + 2 * me.rank, do_sample=False)
        )
    return [*seen, *train(model, me, 1), *values(model)]


@scenario
def generate_without_resident(me: Me) -> list[Tensor]:
    model: Any = sharded(me, built(lambda: plain(NEOX)))
    found = continued(model, words(me, 7, 4), 3)
    return [found, *train(model, me, 1), *values(model)]


@scenario
def load_pretrained_and_save_pretrained(me: Me) -> list[Tensor]:
    """From files to a model that was built on the meta device; a step; and to files."""
    before, after = me.directory / "before", me.directory / "after"
    source = built(lambda: plain(NEOX), seed=3)
    if me.rank == 0:
        source.save_pretrained(before)
    with torch.device("meta"):
        model = built(lambda: plain(NEOX))
    model = sharded(me, model)  # and ranks meet: the files are there
    zero3.load_pretrained(model, before)
    loaded = values(model)
    seen = train(model, me, 1)
    zero3.save_pretrained(model, after)
    saved = load_file(after / "model.safetensors")
    return [*loaded, *seen, *(saved[name] for name in sorted(saved))]
