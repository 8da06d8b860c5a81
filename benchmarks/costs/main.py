"""What each option costs and saves: the peak of a rank's memory, its transfers and their bytes, and how much the host has to do.

    python -m benchmarks.costs.main            the measured columns of docs/costs.md, option by option
    python -m benchmarks.costs.main --write    puts them into the page

A step of a small Llama runs without values, as a plan for GPUs makes it: rank 0 of 8, after the first step. Nothing is timed: bytes are
those of tensors, transfers those that the rank begins, and the host's work is the number of Python calls inside zero3. So the figures are
the same on every machine with the same versions (calls on Python 3.11). `zero3.plan` gives them for a model of yours.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import zero3
from zero3.planning.absent import Issued
from zero3.planning.models import on_paper
from zero3.planning.setup import Setup
from zero3.planning.trace import Trace, peak_of

RANKS, BATCH, SEQUENCE, MIB = 8, 1, 256, 2**20
PAGE = Path(__file__).parents[2] / "docs" / "costs.md"
ZERO3 = str(Path(zero3.__file__).parent)
OF_PLANS = ("/planning/", "/conductors/conducted.py")  # by the latter a plan hears of what ranks do together
BF16, FP32 = torch.bfloat16, torch.float32


class Option(NamedTuple):
    """What a row sets, and the row that it is compared with."""

    policy: Mapping[str, Any] = {}
    setup: Mapping[str, Any] = {}
    beside: str = "nothing"
    accumulating: Callable[[nn.Module], AbstractContextManager[object]] = nullcontext


WORDS = {"family": "words", "sequence": 2048}
ADAPTERS = "LoRA of rank 8"
OPTIONS: dict[str, Option] = {
    "nothing": Option(),
    "param_dtype": Option({"param_dtype": BF16}),
    "reduce_dtype": Option({"param_dtype": BF16, "reduce_dtype": FP32}, beside="param_dtype"),
    "output_dtype": Option({"param_dtype": BF16, "output_dtype": FP32}, beside="param_dtype"),
    "cast_forward_inputs": Option({"param_dtype": BF16, "cast_forward_inputs": False}, beside="param_dtype"),
    "master_dtype": Option({"master_dtype": FP32, "param_dtype": BF16}, {"master_dtype": BF16}, beside="a model in bf16"),
    "grad_dtype": Option({"grad_dtype": FP32}, {"master_dtype": BF16, "optimizer": torch.optim.SGD}, beside="a model in bf16, SGD"),
    "stage=2": Option({"stage": 2}),
    "stage=1": Option({"stage": 1}),
    "dynamic": Option({"dynamic": True}),
    "gradient_reduction": Option({"gradient_reduction": "sum"}),
    "reshard_after_forward": Option({"reshard_after_forward": False}),
    "prefetch_depth=0": Option({"prefetch_depth": 0}),
    "prefetch_depth=2": Option({"prefetch_depth": 2}),
    "separate_backup_group": Option({"separate_backup_group": True}),
    "transactional": Option({"transactional": True}, {"accumulation": 2}, beside="two micro-batches"),
    "compare_every": Option({"compare_every": 0}),
    "ignored": Option({"ignored": lambda name, info: info.ndim == 1}),
    "gather_format": Option({"gather_format": zero3.Int8()}),
    "reduce_format": Option({"reduce_format": zero3.Int8()}),
    "offload": Option({"offload": "cpu"}),
    "expert_parallel": Option({"expert_parallel": True}, {"family": "experts"}, beside="eight experts"),
    "group_adapters": Option({"group_adapters": False}, {"lora": 8}, beside=ADAPTERS),
    "resident_bytes": Option({"resident_bytes": 8 * MIB}, {"lora": 8}, beside=ADAPTERS),
    "quantize": Option({"quantize": zero3.NF4()}, {"lora": 8}, beside=ADAPTERS),
    "no_sync": Option({}, {"accumulation": 2}, beside="two micro-batches", accumulating=zero3.no_sync),
    "causal_lm_loss": Option({}, {**WORDS, "chunked_head": True}, beside="16384 words"),
    "tile": Option({}, {"tile": 64}),
    "split_sequence": Option({}, {"sequence_parallel": 2}),
}  # fmt: skip
BESIDE = {
    "two micro-batches": Option({}, {"accumulation": 2}),
    "a model in bf16": Option({}, {"master_dtype": BF16}),
    "a model in bf16, SGD": Option({}, {"master_dtype": BF16, "optimizer": torch.optim.SGD}),
    ADAPTERS: Option({}, {"lora": 8}),
    "16384 words": Option({}, WORDS),
    "eight experts": Option({}, {"family": "experts"}),
}


class Cost(NamedTuple):
    """Of one step of one rank."""

    peak: int  # bytes of tensors
    received: int  # bytes
    transfers: int
    calls: int


def model_of(family: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    sizes = {
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 16384 if family == "words" else 1024,
    }
    if family == "experts":
        config = Qwen3MoeConfig(**sizes, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2, head_dim=64)
    else:
        config = LlamaConfig(**sizes, intermediate_size=704)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def cost_of(option: Option) -> Cost:
    chosen: dict[str, Any] = {"checkpointing": False, "optimizer": torch.optim.AdamW, "accumulation": 1, "lora": None} | dict(option.setup)
    sequence = chosen.pop("sequence", SEQUENCE)
    source = on_paper(model_of(chosen.pop("family", "Llama")), chosen.get("master_dtype"))
    policy = zero3.ShardingPolicy(**option.policy)
    setup = Setup(source=source, ranks=RANKS, batch=BATCH, sequence=sequence, policy=policy, device="cuda", **chosen)
    trace = setup.trace()
    trace._accumulating = option.accumulating
    peak, _ = peak_of(trace.measure(BATCH, sequence, setup.accumulation))  # tokens go to all experts alike
    events = [event for part in trace.micro_batches(BATCH, sequence, setup.accumulation) for event in part if isinstance(event, Issued)]
    return Cost(peak, sum(event.nbytes for event in events), len(events), calls_of(trace, setup))


def calls_of(trace: Trace, setup: Setup) -> int:
    """Python calls inside zero3 in a step, those of the plan apart."""
    count = 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        file = frame.f_code.co_filename
        count += event == "call" and file.startswith(ZERO3) and not any(part in file for part in OF_PLANS)

    sys.setprofile(called)
    try:
        with trace.ledger, trace.kernels:
            trace._step(BATCH, setup.sequence, setup.accumulation)
    finally:
        sys.setprofile(None)
    return count


def change(cost: Cost, beside: Cost) -> list[str]:
    """The measured cells of a row: what it adds to, or takes from, what it is compared with."""
    return [
        f"{round((cost.peak - beside.peak) / MIB, 2) + 0.0:+.2f}",  # no -0.00
        f"{round((cost.received - beside.received) / MIB, 2) + 0.0:+.2f}",
        f"{cost.transfers - beside.transfers:+d}",
        f"{round(cost.calls / beside.calls - 1, 2) + 0.0:+.0%}",
    ]


def measured(names: list[str]) -> dict[str, list[str]]:
    """The cells of each of these options."""
    found: dict[str, Cost] = {}

    def cost(name: str) -> Cost:
        if name not in found:
            found[name] = cost_of({**OPTIONS, **BESIDE}[name])
        return found[name]

    return {name: change(cost(name), cost(OPTIONS[name].beside)) for name in names}


def row_of(page: str, name: str) -> str:
    """The page's row of an option."""
    (row,) = re.findall(rf"^\| `{re.escape(name)}`.*$", page, re.M)
    return str(row)


def cells_of(page: str, name: str) -> list[str]:
    """The measured ones: the third to the sixth of a row."""
    return [cell.strip() for cell in row_of(page, name).strip("|").split(" | ")][2:6]


def written(page: str, name: str, cells: list[str]) -> str:
    row = row_of(page, name)
    parts = row.split(" | ")
    return page.replace(row, " | ".join([*parts[:2], *cells, *parts[6:]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the figures into docs/costs.md")
    arguments = parser.parse_args()
    plain = cost_of(OPTIONS["nothing"])
    print(f"nothing: peak {plain.peak / MIB:.2f} MiB, {plain.received / MIB:.2f} MiB in {plain.transfers} transfers, {plain.calls} calls")
    page = PAGE.read_text() if arguments.write else ""
    for name, cells in measured([name for name in OPTIONS if name != "nothing"]).items():
        print(f"{name:<24} beside {OPTIONS[name].beside:<22}", *(f"{cell:>9}" for cell in cells))
        page = written(page, name, cells) if arguments.write else page
    if arguments.write:
        PAGE.write_text(page)


if __name__ == "__main__":
    main()
