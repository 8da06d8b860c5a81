"""Steps that others measured on GPUs and published, against what a plan tells of them. No GPU is used here.

    python -m benchmarks.plan.published                    # all rows that are judged: some twenty minutes of a processor
    python -m benchmarks.plan.published --models 8b 13b
    python -m benchmarks.plan.published --gpus a100 --output results
    python -m benchmarks.plan.published --apart            # and llm-foundry's other lengths, which are not judged

The rows are published.csv's. A plan is made of each as `python -m zero3 plan` makes it: an AdamW of lists of tensors, masters in fp32,
computation in bf16. Two constants of `zero3/planning/cluster.py` are fitted, both to rows that are not judged. The null hypothesis is a
GPU that always computes at the same rate, the one that is best for the very rows which are judged: only operations count.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel, logging

import zero3
from benchmarks.common.report import markdown, progress
from benchmarks.race.models import SHAPES, Shape, every_second_product
from zero3.planning.cluster import GPUS, Cluster, cluster_of, replay
from zero3.planning.models import on_paper
from zero3.planning.setup import Setup
from zero3.planning.work import Work

ROWS = Path(__file__).with_name("published.csv")
SOURCES = {
    "llm-foundry": "https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md",
    "torchtitan-a100": "https://github.com/pytorch/torchtitan/blob/0413364/docs/performance.md",
    "torchtitan-h100": "https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md",
    "torchtitan-165": "https://github.com/pytorch/torchtitan/pull/165",
}
# Published for A100 (llm-foundry: 1600 a node) and for GPUs of 500 W; assumed for others of their kind. Bytes a second of one GPU.
LINKS = {"a100": 25e9, "a100-40": 25e9, "h100": 50e9, "h100-500w": 50e9}
FITTED, JUDGED, APART = "fitted", "judged", "apart"
SHARES = [share / 100 for share in range(40, 81)]  # of the data sheet's FLOP/s, that are tried
LEFT_OUT = {
    "torchtitan H100, 8 and 128 GPUs: 6667, 8532, 6514, 8380": "torch.compile, and fp8: a plan knows neither",
    "torchtitan H100, long sequences; 70B, 405B; async TP": "fp8, torch.compile, and parallelism of other kinds",
    "torchtitan pull request 165, FSDP1: 6150, 6600": "the cells of the fit once more, with another library",
    "trainy, H200, 8B: 10938, 10753": "torch.compile, fp8",
    "llm-foundry, H100 FP8": "fp8",
    "llm-foundry, sequences of other lengths than 2048 (--apart)": "attention is Triton's, a kernel that a plan does not know",
    "fms-fsdp, A100 and H100, 7b to 70b": "torch.compile is its default, and the tables do not say otherwise",
    "torchtune, Llama 3.2 3B, 8B, 70B": "torch.compile, or a mask of packed sequences: its kernel is not known",
    "torchtune, LoRA, QLoRA, 405B": "torch.compile; offload",
    "fsdp_qlora, 3090, 4090, A100, H100": "LoRA: its own kernels for four bits, links of PCIe that are not told, offload",
    "DeepSpeed bf16 states; OpenTau; Qwen3-30B-A3B; Megatron-FSDP": "the GPU or the recipe is not told, or a plan has no such parallelism",
}


@dataclass(frozen=True)
class Row:
    """What was run, and what was published: tokens a second and GPU, the middle of a range. Batch: sequences of a micro-batch."""

    source: str
    gpu: str
    model: str
    tokens: int  # of a sequence
    ranks: int
    batch: int
    accumulation: int
    checkpointing: str  # none, full, layer (every second block), op (by operator)
    reduction: str
    published: int
    standing: str

    @property
    def seconds(self) -> float:
        return self.batch * self.accumulation * self.tokens / self.published

    @property
    def cluster(self) -> Cluster:
        return cluster_of(self.gpu, LINKS[self.gpu])

    @property
    def cells(self) -> list[str]:
        times = f" x {self.accumulation}" if self.accumulation > 1 else ""
        return [self.gpu, self.model, f"{self.ranks}", f"{self.batch}{times} x {self.tokens}", self.checkpointing]


def rows() -> list[Row]:
    with ROWS.open() as file:
        return [Row(**{name: int(value) if value.isdecimal() else value for name, value in each.items()}) for each in csv.DictReader(file)]


LLAMAS = {
    "7b": SHAPES["7b"], "8b": SHAPES["8b"], "70b": SHAPES["70b"], "70b-2": replace(SHAPES["70b"], words=32000),
    "13b": Shape(40, 5120, 13824, 40, 40, 32000),
}  # fmt: skip
# MosaicML's MPT: width, blocks, heads. GPT-2 has the same parts: positions that are learned, tied embeddings, biases.
MPTS = {
    "mpt-125m": (768, 12, 12), "mpt-350m": (1024, 24, 16), "mpt-760m": (1536, 24, 12), "mpt-1b": (2048, 24, 16), "mpt-3b": (2560, 32, 20),
    "mpt-7b": (4096, 32, 32), "mpt-13b": (5120, 40, 40), "mpt-30b": (7168, 48, 56), "mpt-70b": (8192, 80, 64),
}  # fmt: skip


def model_of(name: str, tokens: int, checkpointing: str = "none") -> PreTrainedModel:
    """On the meta device."""
    with torch.device("meta"):
        model = GPT2LMHeadModel(_mpt(*MPTS[name], tokens)) if name in MPTS else LlamaForCausalLM(_llama(LLAMAS[name], tokens))
    if checkpointing != "none":
        how = {"context_fn": every_second_product} if checkpointing == "op" else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **how})
    if checkpointing == "layer":
        for block in model.model.layers[::2]:
            block.gradient_checkpointing = False
    return model


def _mpt(width: int, blocks: int, heads: int, tokens: int) -> GPT2Config:
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    return GPT2Config(
        n_embd=width, n_layer=blocks, n_head=heads, vocab_size=50368, n_positions=tokens, activation_function="gelu", **drops
    )  # fmt: skip


def _llama(shape: Shape, tokens: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=shape.width, intermediate_size=shape.inner, num_hidden_layers=shape.blocks, num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups, vocab_size=shape.words, max_position_embeddings=tokens, tie_word_embeddings=False,
    )  # fmt: skip


@cache
def events(row: Row) -> Sequence[Any]:
    """A plan's events of a step."""
    reduction = {"bf16": torch.bfloat16, "fp32": torch.float32}[row.reduction]
    setup = Setup(
        source=on_paper(model_of(row.model, row.tokens, row.checkpointing)), ranks=row.ranks, batch=row.batch, sequence=row.tokens,
        policy=zero3.ShardingPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduction), checkpointing=False,
        optimizer=torch.optim.AdamW, accumulation=row.accumulation, lora=None, device="cuda",
    )  # fmt: skip
    return setup.trace().events(row.batch, row.tokens, row.accumulation)


@dataclass(frozen=True)
class Told:
    """What a plan tells of a row: seconds, and the operations that are in them."""

    row: Row
    seconds: float
    flops: int

    @property
    def error(self) -> float:
        return self.seconds / self.row.seconds - 1


def told(row: Row, steps: Sequence[Any]) -> Told:
    flops = sum(event.flops for event in steps if isinstance(event, Work))
    return Told(row, replay(steps, row.cluster, row.ranks), flops)


def fitted(among: Iterable[Row]) -> float:
    """The share of the data sheet's FLOP/s that is nearest to these rows."""
    steps = {row: events(row) for row in among}

    def missed(share: float) -> float:
        return sum(math.log(replay(each, replace(row.cluster, reached=share), row.ranks) / row.seconds) ** 2 for row, each in steps.items())

    return min(SHARES, key=missed)


def rms(errors: Iterable[float]) -> float:
    return math.sqrt(statistics.fmean(error**2 for error in errors))


def null(found: Sequence[Told]) -> list[float]:
    """The errors if each GPU always computed at one rate, the best for these rows."""
    errors = []
    for gpu in dict.fromkeys(each.row.gpu for each in found):
        rates = [math.log(each.flops / each.row.seconds) for each in found if each.row.gpu == gpu]
        errors += [math.exp(rate - statistics.fmean(rates)) - 1 for rate in rates]
    return errors


def summary(found: Sequence[Told]) -> list[list[str]]:
    """By GPU, and of all: rows, rms, the mean error, the two ends, and the null's rms."""
    lines = []
    for gpu in [*dict.fromkeys(each.row.gpu for each in found), "all"]:
        some = [each for each in found if gpu in (each.row.gpu, "all")]
        errors = [each.error for each in some]
        numbers = f"{rms(errors):.1%}", f"{statistics.fmean(errors):+.1%}", f"{min(errors):+.1%} to {max(errors):+.1%}"
        lines.append([gpu, f"{len(some)}", *numbers, f"{rms(null(some)):.1%}"])
    return lines


def report(chosen: Sequence[Row]) -> str:
    found = []
    for row in chosen:
        found.append(told(row, events(row)))
        events.cache_clear()
        progress(f"{' | '.join(row.cells)} | {found[-1].error:+.1%}")
    judged = [each for each in found if each.row.standing == JUDGED]
    lines = [
        [*each.row.cells, each.row.source, f"{each.row.seconds:.3f}", f"{each.seconds:.3f}", f"{each.error:+.1%}{standing(each.row)}"]
        for each in found
    ]
    fits = {gpu: fitted(each for each in rows() if (each.gpu, each.standing) == (gpu, FITTED)) for gpu in gpus_of(chosen)}
    return "\n\n".join(
        [
            "No GPU was used: seconds are a plan's, and what others published.",
            markdown(["GPU", "model", "GPUs", "a GPU's batch", "checkpointing", "source", "published s", "planned s", ""], lines),
            markdown(["GPU", "rows judged", "rms", "mean", "from, to", "null: rms"], summary(judged) if judged else []),
            *(f"Fitted, {gpu}: {share:.2f} of the data sheet's FLOP/s (cluster.py has {GPUS[gpu][3]})." for gpu, share in fits.items()),
            markdown(["published too, and not judged", "why"], list(LEFT_OUT.items())),
            markdown(["source", "address"], list(SOURCES.items())),
        ]
    )


def standing(row: Row) -> str:
    return "" if row.standing == JUDGED else f" ({row.standing})"


def gpus_of(chosen: Iterable[Row]) -> list[str]:
    """Those with a constant that is fitted."""
    return list(dict.fromkeys(row.gpu for row in rows() if row.standing == FITTED and row.gpu in {each.gpu for each in chosen}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*LLAMAS, *MPTS], default=[*LLAMAS, *MPTS])
    parser.add_argument("--gpus", nargs="+", choices=[*LINKS], default=[*LINKS])
    parser.add_argument("--apart", action="store_true", help="rows that are not judged as well")
    parser.add_argument("--output", type=Path, help="a directory for published.md")
    options = parser.parse_args()
    logging.set_verbosity_error()
    standings = {FITTED, JUDGED, *([APART] if options.apart else [])}
    chosen = [row for row in rows() if row.model in options.models and row.gpu in options.gpus and row.standing in standings]
    if not chosen:
        parser.error("no row of published.csv is of these models and GPUs")
    text = report(chosen)
    print(text)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "published.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
