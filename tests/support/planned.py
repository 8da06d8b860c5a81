"""Small models of several families, and what a rank of a real group holds at most in a step of theirs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPTNeoXConfig,
    LlamaConfig,
    Mamba2Config,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    T5Config,
)

import zero3
from benchmarks.offload.counted import mapped_addresses
from tests.support.live import LiveBytes
from tests.support.processes import Rank

PLANS = [  # marks of tests that plan
    pytest.mark.skipif(Version(transformers.__version__) < Version("5.4"), reason="rotary embeddings need values before transformers 5.4"),
]
WIDTH, WORDS = 64, 320
COMMON: dict[str, Any] = {"hidden_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": WORDS}
FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "Llama": lambda: LlamaConfig(**COMMON, intermediate_size=172, num_key_value_heads=2, tie_word_embeddings=False),
    "Llama, tied": lambda: LlamaConfig(**COMMON, intermediate_size=172, num_key_value_heads=4, tie_word_embeddings=True),
    "NeoX": lambda: GPTNeoXConfig(**COMMON, intermediate_size=256),
    "Qwen2Moe": lambda: Qwen2MoeConfig(
        **COMMON, intermediate_size=128, moe_intermediate_size=48, shared_expert_intermediate_size=64, num_experts=6, num_experts_per_tok=2,
        num_key_value_heads=2,
    ),
    "Qwen3Moe": lambda: Qwen3MoeConfig(
        **COMMON, intermediate_size=128, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2, num_key_value_heads=2, head_dim=16,
    ),
    "Mamba2": lambda: Mamba2Config(
        hidden_size=WIDTH, num_hidden_layers=3, num_heads=8, head_dim=16, state_size=16, n_groups=2, chunk_size=16, vocab_size=WORDS,
    ),
    "T5": lambda: T5Config(d_model=WIDTH, d_kv=16, d_ff=192, num_layers=3, num_heads=4, vocab_size=WORDS, decoder_start_token_id=0),
}  # fmt: skip


class Case(NamedTuple):
    """What a plan is made for, and what ranks do. Plain values, which travel to other processes."""

    family: str = "Llama"
    batch: int = 2
    sequence: int = 48
    checkpointing: bool = False
    lora: int | None = None
    accumulation: int = 1
    optimizer: str = "AdamW"
    master_dtype: torch.dtype = torch.float32
    policy: tuple[tuple[str, Any], ...] = ()
    replicas: int = 1
    fused: bool = False


def norms(name: str, info: zero3.ParamInfo) -> bool:
    """For a policy: which parameters are left alone."""
    return info.ndim == 1


def policy_of(case: Case) -> zero3.ShardingPolicy:
    return zero3.ShardingPolicy(**dict(case.policy))


def optimizer_of(case: Case) -> Callable[..., torch.optim.Optimizer]:
    made: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, case.optimizer)
    return partial(made, fused=True) if case.fused else made


CAUSES = ("chunks", "full_buffers", "gradients", "optimizer", "activations", "logits", "transfers")  # keys of a plan's `by_cause`


def model_of(case: Case) -> nn.Module:
    config = FAMILIES[case.family]()
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return kind.from_config(config, dtype=case.master_dtype)


def plan_of(case: Case, ranks: int, **more: Any) -> Any:
    return zero3.plan(
        model_of(case), ranks=ranks, batch=case.batch, sequence=case.sequence, policy=policy_of(case), checkpointing=case.checkpointing,
        optimizer=optimizer_of(case), accumulation=case.accumulation, lora=case.lora, device="cpu",
        mesh=None if case.replicas == 1 else (case.replicas, ranks // case.replicas), **more,
    )  # fmt: skip


def group_of(case: Case) -> Any:
    """The mesh of the case's ranks; None for all of them."""
    shape = (case.replicas, dist.get_world_size() // case.replicas) if case.replicas > 1 else ()
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")) if shape else None


def peak_on(rank: Rank, case: Case) -> int:
    """The most bytes of this rank's living tensors in the second step, but for those in files."""
    return peak_and_files_on(rank, case)[0]


def peak_and_files_on(rank: Rank, case: Case) -> tuple[int, int]:
    """The same, and the bytes of the files in which tensors rest."""
    warnings.filterwarnings("ignore", ".* is deprecated and will be removed", FutureWarning)  # transformers' of what peft asks it
    with LiveBytes() as live, mapped_addresses() as mapped:
        live.left_out = mapped
        torch.manual_seed(0)
        model = model_of(case)
        model.train()
        if case.lora is not None:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=case.lora))
        if case.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        zero3.shard(model, policy=policy_of(case), process_group=group_of(case))
        optimizer = zero3.offload_optimizer(optimizer_of(case)(zero3.get_trainable_chunk(model)))

        def step() -> None:
            for _ in range(case.accumulation):
                ids = torch.randint(WORDS, (case.batch, case.sequence))
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return live.peak_of(step), sum(mapped.values())
