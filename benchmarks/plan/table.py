"""The table of docs/plan.md: what a rank holds for models of five sizes, on 1 to 64 GPUs.

    python -m benchmarks.plan.table                # nine minutes of a processor; no GPU, weights or network
    python -m benchmarks.plan.table 8B --ranks 8

A cell is the peak of a step in GiB: one sequence of 2048 tokens a rank, checkpoints in each block, computation in bf16, AdamW.
Full training has fp32 masters; LoRA has frozen weights in bf16 and adapters of rank 16 where peft puts them by default. QLoRA
stores these frozen weights as NF4. Where `offload="cpu"` makes it fit into a smaller GPU, a row more says so, with the GiB that
rest in host memory for each rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import GptOssConfig, LlamaConfig, PretrainedConfig, Qwen3Config

import zero3
from benchmarks.common.report import markdown
from zero3.planning.result import Plan

LLAMA: dict[str, Any] = {"vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False, "max_position_embeddings": 8192}
MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "8B": lambda: LlamaConfig(**LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32),
    "32B": lambda: Qwen3Config(
        vocab_size=151936, hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, tie_word_embeddings=False,
    ),
    "70B": lambda: LlamaConfig(**LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64),
    "gpt-oss-120b": lambda: GptOssConfig(
        vocab_size=201088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=36, num_attention_heads=64, num_key_value_heads=8,
        head_dim=64, num_local_experts=128, num_experts_per_tok=4, tie_word_embeddings=False,
    ),
    "405B": lambda: LlamaConfig(**LLAMA, hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128),
}  # fmt: skip
TRAININGS: dict[str, dict[str, Any]] = {
    "full": {"master_dtype": torch.float32, "policy": zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "LoRA": {"master_dtype": torch.bfloat16, "lora": 16},
    "QLoRA": {"master_dtype": torch.bfloat16, "lora": 16, "policy": zero3.ShardingPolicy(quantize=zero3.NF4())},
}
GPUS = (24, 80)  # GB


def plan_of(directory: str, ranks: int, training: str, *, offload: str | None = None) -> Plan:
    chosen = TRAININGS[training]
    policy = replace(chosen.get("policy", zero3.ShardingPolicy()), offload=offload)
    return zero3.plan(directory, ranks=ranks, sequence=2048, checkpointing=True, **{**chosen, "policy": policy})


def gpu_for(plan: Plan) -> float:
    """The smallest GPU that it fits into, with the upper end of what is not known."""
    return next((size for size in GPUS if plan.peak_bytes + plan.unknown[1] <= size * 10**9), float("inf"))


def cell(plan: Plan) -> str:
    """The peak in GiB, the GPU, and what rests in the memory of the host."""
    fitting = f" ({gpu_for(plan):g})" if gpu_for(plan) in GPUS else ""
    return f"{plan.peak_bytes / 2**30:.1f}{fitting}" + (f", host {plan.offloaded_bytes / 2**30:.0f}" if plan.offloaded_bytes else "")


def rows_of(name: str, directory: str, training: str, ranks: list[int]) -> list[list[str]]:
    """A row for a training, and one for the same with chunks in host memory, if they then fit into a smaller GPU."""
    plans = [plan_of(directory, number, training) for number in ranks]
    away = [
        None if gpu_for(plan) == min(GPUS) else plan_of(directory, number, training, offload="cpu")
        for number, plan in zip(ranks, plans, strict=True)
    ]
    helped = [plan if plan is not None and gpu_for(plan) < gpu_for(before) else None for plan, before in zip(away, plans, strict=True)]
    offloaded = [name, f"{training}, offloaded", *("" if plan is None else cell(plan) for plan in helped)]
    return [[name, training, *map(cell, plans)], *([offloaded] if any(plan is not None for plan in helped) else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="all of them, if none is named")
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args()
    warnings.filterwarnings("ignore", ".* is deprecated and will be removed", FutureWarning)  # transformers' of what peft asks it
    columns, rows = ["model", "training", *(f"{ranks} GPU{'s' * (ranks > 1)}" for ranks in options.ranks)], []
    for name in options.models or MODELS:
        with tempfile.TemporaryDirectory() as directory:
            MODELS[name]().save_pretrained(directory)
            for training in options.trainings:
                rows += (found := rows_of(name, directory, training, options.ranks))
                print(*map(" | ".join, found), sep="\n", file=sys.stderr, flush=True)
    print(markdown(columns, rows))


if __name__ == "__main__":
    main()
