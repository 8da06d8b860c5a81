"""Plans against one GPU: what `zero3.plan` says of a step of rank 0 of 8, and what the card's allocator and clock say.

    python benchmarks/gpu/planned.py --output results      # one CUDA device; some minutes
    python benchmarks/gpu/planned.py --smoke               # tiny, on the CPU: its numbers mean nothing

A Llama with the widths of 8B is built by transformers with values drawn at random. The other ranks don't exist: a transfer is a delay of
its bytes over a link (as in benchmarks/gpu, part c), so buffers hold what they hold. Memory, kernels and their order are those of a step.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, from anywhere

import torch
from torch import nn

import zero3
from benchmarks.common.alone import rank_zero_of
from benchmarks.common.ranks import RanksFailed, alone
from benchmarks.common.report import markdown, median, progress, write
from benchmarks.gpu.device import device
from zero3.planning.cluster import cluster_of

RANKS, LINK = 8, 450e9  # bytes a second in one direction, between GPUs of one host
MIXED = {"master_dtype": torch.float32, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
# name -> fields of the policy, and what else a plan and a step are told
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({}, {}),
    "mixed": (MIXED, {}),
    "mixed, checkpointing": (MIXED, {"checkpointing": True}),
    "mixed, stage 2": ({**MIXED, "stage": 2}, {}),
    "mixed, depth 2": ({**MIXED, "prefetch_depth": 2}, {}),
    "mixed, Int8 both ways": ({**MIXED, "gather_format": zero3.Int8(), "reduce_format": zero3.Int8()}, {}),
    "mixed, offload cpu": ({**MIXED, "offload": "cpu"}, {"checkpointing": True}),
    "NF4, LoRA 16": ({"quantize": zero3.NF4()}, {"checkpointing": True, "lora": 16}),
    "mixed, chunked head": (MIXED, {"checkpointing": True, "chunked_head": True}),
}


def model_of(smoke: bool, layers: int, where: str) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    widths = (64, 128, 4, 2, 320) if smoke else (4096, 14336, 32, 8, 128256)
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    config = LlamaConfig(**dict(zip(names, widths, strict=True)), num_hidden_layers=layers, tie_word_embeddings=False)
    with torch.device(where):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.train()


def measured(name: str, layers: int, tokens: int, steps: int, smoke: bool) -> dict[str, Any]:
    of, (fields, more) = device(smoke), CASES[name]
    warnings.simplefilter("ignore")  # peft's and transformers' of each other
    with rank_zero_of(RANKS) as transfers:
        model = model_of(smoke, layers, of.name)
        if "lora" in more:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=more["lora"]))
        if more.get("checkpointing"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        zero3.shard(model, policy=zero3.ShardingPolicy(**fields), device=of.name)
        of.empty_cache()
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=1e-4)
        optimizer = zero3.offload_optimizer(optimizer) if "offload" in fields else optimizer
        ids = torch.randint(320, (1, tokens), device=of.name)
        link = of.link(LINK)

        def step() -> None:
            if more.get("chunked_head"):
                loss = zero3.causal_lm_loss(model, input_ids=ids, labels=ids)
            else:
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # ranks compare what they do, once
        transfers.replace(link)
        step()
        of.synchronize()
        of.restart_peaks()
        seconds = []
        for _ in range(steps):
            first = of.clock.now()
            step()
            seconds.append(of.clock.seconds(first, of.clock.now()))
        return {"seconds": median(seconds), **of.peaks(), "outside": of.outside()}


def planned(name: str, layers: int, tokens: int, smoke: bool, gpu: str) -> dict[str, Any]:
    fields, more = CASES[name]
    model, where = model_of(smoke, layers, "meta"), {"device": "cpu" if smoke else "cuda"}
    policy, cluster = zero3.ShardingPolicy(**fields), cluster_of(gpu, LINK)
    plan = zero3.plan(model, ranks=RANKS, sequence=tokens, policy=policy, cluster=cluster, **more, **where)
    return {"peak": plan.peak_bytes, "seconds": plan.seconds, "unknown": plan.unknown}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU: shows that the script runs, and nothing else")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="rows of the table; default: all")
    parser.add_argument("--layers", type=int, default=8, help="blocks; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="in the one sequence of a step; default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="measured steps; default: %(default)s")
    parser.add_argument("--gpu", default="h200", help="the plan's, by the names of `zero3 plan --gpu`; default: %(default)s")
    parser.add_argument("--output", type=Path, help="a folder for the table and all that was measured")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu/planned.py needs one CUDA device, and finds none. (--smoke runs its paths, tiny, on the CPU.)")
    layers, tokens = (2, 16) if args.smoke else (args.layers, args.tokens)
    found, rows, failed = {}, [], []
    for name in args.cases:
        progress(name)
        try:
            plan = alone(planned, name, layers, tokens, args.smoke, args.gpu)
            seen = alone(measured, name, layers, tokens, args.steps, args.smoke)
        except RanksFailed as error:
            progress(str(error))
            failed.append(f"{name}: {str(error).strip().splitlines()[-1]}")
            continue
        found[name] = {"plan": plan, "measured": seen}
        rows.append([name, *row(plan, seen)])
        progress(" | ".join(map(str, rows[-1])))
    columns = ["policy", "planned GB", "allocated GB", "off by", "reserved x allocated", "outside GB", "planned ms", "ms a step", "off by"]
    write(args.output, "planned", {"smoke": args.smoke, "cases": found, "failed": failed}, "\n".join([markdown(columns, rows), *failed]))
    sys.exit(bool(failed))


def row(plan: dict[str, Any], seen: dict[str, Any]) -> list[str]:
    peak, time = seen["allocated"] or plan["peak"], plan["seconds"]  # in a smoke test nothing counts
    held = [f"{plan['peak'] / 1e9:.3f}", f"{peak / 1e9:.3f}", f"{plan['peak'] / peak - 1:+.1%}"]
    beside = [f"{seen['reserved'] / peak:.3f}", f"{seen['outside'] / 1e9:.2f}"]
    timed = ["", f"{seen['seconds'] * 1e3:.1f}", ""]
    if time is not None:
        timed = [f"{time * 1e3:.1f}", timed[1], f"{time / seen['seconds'] - 1:+.0%}"]
    return [*held, *beside, *timed]


if __name__ == "__main__":
    main()
