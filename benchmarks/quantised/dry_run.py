"""What a step of Llama-3-70B takes on each rank, by cause: its base in NF4, adapters of rank 16. No weights, no GPU, a minute each.

    python -m benchmarks.quantised.dry_run

It is `zero3.plan` for GPUs: zero3's own code runs on the meta device, and every tensor is counted. Activations are those of one
sequence of 2048 tokens, with a checkpoint in each block, computed in bf16. The loss is computed as trainers do: by transformers
(`labels=`), with the logits of all tokens; or in pieces of 128 tokens, each under a checkpoint, so that few logits exist at once.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import peft
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

import zero3
from benchmarks.common.report import markdown, progress
from zero3.planning.ledger import CAUSES

PIECE = 128  # tokens
LORA_RANK = 16
GIB = 2**30
TARGETS = (("q_proj", "v_proj"), "all-linear")  # where peft puts them by default; everywhere


class LossInPieces(LlamaForCausalLM):
    """The same loss, without all logits at once."""

    def forward(self, input_ids: Tensor, labels: Tensor, **options: Any) -> CausalLMOutput:
        hidden = self.model(input_ids, use_cache=False).last_hidden_state
        words = labels.roll(-1, 1)
        words[:, -1] = -100
        pieces = zip(hidden.split(PIECE, 1), words.split(PIECE, 1), strict=True)
        losses = [checkpoint(self._of_piece, states, each, use_reentrant=False) for states, each in pieces]
        return CausalLMOutput(loss=torch.stack(losses).sum() / (labels.numel() - len(labels)))

    def _of_piece(self, states: Tensor, words: Tensor) -> Tensor:
        return cross_entropy(self.lm_head(states).float().flatten(0, 1), words.flatten(), reduction="sum")


def llama(blocks: int, in_pieces: bool) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=blocks, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        return (LossInPieces if in_pieces else LlamaForCausalLM)._from_config(config, dtype=torch.bfloat16)


def planned(ranks: int, *, targets: Any = TARGETS[0], in_pieces: bool = True, prefetch_depth: int = 1, blocks: int = 80) -> zero3.Plan:
    policy = zero3.ShardingPolicy(quantize=zero3.NF4(), param_dtype=torch.bfloat16, prefetch_depth=prefetch_depth)
    lora = peft.LoraConfig(r=LORA_RANK, target_modules=targets if isinstance(targets, str) else list(targets))
    return zero3.plan(llama(blocks, in_pieces), ranks=ranks, batch=1, sequence=2048, policy=policy, checkpointing=True, lora=lora)


def row(plan: zero3.Plan, ranks: int, *, targets: Any = TARGETS[0], in_pieces: bool = True, prefetch_depth: int = 1) -> list[str]:
    causes = [f"{plan.by_cause[cause] / GIB:.2f}" for cause in CAUSES]
    adapters = "all linear" if targets == "all-linear" else "q, v"
    return [str(ranks), adapters, "in pieces" if in_pieces else "all logits", str(prefetch_depth), *causes, f"{plan.peak_bytes / GIB:.2f}"]


VARIANTS: list[dict[str, Any]] = [
    {"prefetch_depth": 0},
    {},
    {"in_pieces": False},
    {"targets": TARGETS[1], "prefetch_depth": 0},
    {"targets": TARGETS[1]},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--blocks", type=int, default=80)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    found = []
    for ranks in args.ranks:
        for variant in VARIANTS:
            progress(f"{ranks} ranks {variant}")
            found.append(row(planned(ranks, blocks=args.blocks, **variant), ranks, **variant))
            progress(" | ".join(found[-1]))
    print(markdown(["ranks", "adapters on", "loss", "prefetch_depth", *(cause.replace("_", " ") for cause in CAUSES), "GiB a rank"], found))


if __name__ == "__main__":
    main()
