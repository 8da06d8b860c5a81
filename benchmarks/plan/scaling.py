"""Weak scaling that others published, against what a plan says: how much of the throughput a rank is left on more ranks.

    python -m benchmarks.plan.scaling

MosaicML's llm-foundry: FSDP on A100-40 with 1600 Gbit/s a node, sequences of 2048, bf16; tokens a second and GPU. Micro-batches were
not published; we take 4 sequences. One constant, the spread of a rank's step, is fitted to the 7b at 128 ranks; all else is told by it.
The null hypothesis is that every rank is as fast as on 32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import GPTNeoXConfig
from transformers import GPTNeoXForCausalLM as NeoX

import zero3
from benchmarks.common.report import markdown
from zero3.planning.cluster import Cluster, cluster_of, replay
from zero3.planning.models import prepare
from zero3.planning.trace import Trace

RANKS = (32, 64, 128)
PUBLISHED = {"7b": (3725, 3665, 3623), "3b": (9914, 9736, 9538), "760m": (29648, 29344, 28940)}
SIZES = {"7b": (4096, 32, 32), "3b": (2560, 32, 20), "760m": (1536, 24, 12)}  # width, blocks, heads
BATCH, SEQUENCE, VOCABULARY = 4, 2048, 50368
SPREADS = [number / 1000 for number in range(151)]


def step(name: str, ranks: int) -> list[Any]:
    """The events of a step of a transformer of that size, with fp32 masters and bf16 transfers."""
    width, blocks, heads = SIZES[name]
    config = GPTNeoXConfig(
        hidden_size=width, num_hidden_layers=blocks, num_attention_heads=heads, intermediate_size=4 * width, vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = prepare(NeoX(config), lora=None, checkpointing=name == "7b")
    policy = zero3.ShardingPolicy(param_dtype=torch.bfloat16)
    return Trace(model, ranks=ranks, policy=policy, device="cuda", optimizer=torch.optim.AdamW).events(BATCH, SEQUENCE)


def ratios(steps: dict[int, list[Any]], cluster: Cluster) -> list[float]:
    seconds = [replay(steps[ranks], cluster, ranks) for ranks in RANKS]
    return [seconds[0] / each for each in seconds[1:]]


def main() -> None:
    steps = {name: {ranks: step(name, ranks) for ranks in RANKS} for name in SIZES}
    plain = cluster_of("a100", 200e9 / 8)

    def missed(spread: float) -> float:
        found = ratios(steps["7b"], replace(plain, spread=spread) if spread else plain)[-1]
        return abs(found - PUBLISHED["7b"][-1] / PUBLISHED["7b"][0])

    spread = min(SPREADS, key=missed)
    rows = []
    for name, published in PUBLISHED.items():
        by_events, with_spread = ratios(steps[name], plain), ratios(steps[name], replace(plain, spread=spread))
        for number, ranks in enumerate(RANKS[1:]):
            found = published[number + 1] / published[0]
            told = [f"{value:.3f} ({value / found - 1:+.1%})" for value in (by_events[number], with_spread[number], 1.0)]
            rows.append([name, ranks, f"{found:.3f}", *told])
    print(f"spread of a rank's step: {spread:.3f}\n")
    print(markdown(["model", "ranks", "published", "by events alone", "with the spread", "null"], rows))


if __name__ == "__main__":
    main()
