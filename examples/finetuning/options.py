"""The command line of `finetune.py`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

import zero3

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
FORMATS = {"nf4": zero3.NF4(), "int8": zero3.Int8(), "float8": zero3.Float8(), "mxfp4": zero3.MXFP4()}
DTYPE_HELP = """of the weights. bf16 halves the memory. With --lora it is the frozen model that is bf16, and the adapters stay fp32;
without, weights, gradients and optimizer state are all bf16: a weight has 8 bits of precision, and ignores steps below 1/256 of it
(--compute bf16 is what you want then)"""
GATHER_FORMATS = {"int8": zero3.Int8(), "float8": zero3.Float8()}
REDUCE_FORMATS = {"int8": zero3.Int8(), "int8-stochastic": zero3.Int8(stochastic=True)}
COMPUTE_HELP = "of computation, if other than --dtype: weights are cast to it on their way to the other ranks, their master copies stay"


def options_of(arguments: Sequence[str] | None, description: str) -> argparse.Namespace:
    """The options in `arguments`. `description`: of the program, and after an empty line examples of its use."""
    parser = parser_for(description)
    options = parser.parse_args(arguments)
    if options.lora is not None and options.model is None:
        parser.error("argument --lora: adapters belong to a model that was there before: name it with --model")
    if options.quantize is not None and options.lora is None:
        parser.error("argument --quantize: what is quantised does not train, so it needs --lora")
    if options.lora is not None and options.train != "all":
        parser.error("argument --lora: the adapters are what is trained, so leave --train away")
    if options.lr is None:
        options.lr = 3e-3 if options.model is None else 3e-5 if options.lora is None else 3e-4  # trained weights have something to lose
    options.dtype, options.policy = DTYPES[options.dtype], policy_of(options)
    options.checkpoint_dir = options.checkpoint_dir or options.output / "checkpoints"
    return options


def parser_for(description: str) -> argparse.ArgumentParser:
    summary, _, examples = description.partition("\n\n")
    parser = argparse.ArgumentParser(description=summary, epilog=examples, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face directory of a causal model; without it a small GPT-NeoX is made")
    add("--text", type=Path, metavar="FILE", help="what to train on; without it, the help pages that come with Python")
    add("--output", type=Path, metavar="DIR", default=Path("finetuned"), help="for the model or adapters, loss.png, summary.json")
    add("--train", type=trainable, metavar="CHOICE", default="all", help="all, biases, or last-N: N blocks and what follows them")
    add("--lora", type=positive, metavar="R", help="train LoRA adapters of rank R instead (needs --model); they are what is saved")
    add("--quantize", choices=FORMATS, help="store the frozen model's linear layers in this format (needs --lora)")
    add("--offload", metavar="WHERE", help="let chunks, gradients and moments rest in the host's memory (cpu), or in files in a directory")
    add("--dtype", choices=DTYPES, default="fp32", help=DTYPE_HELP)
    add("--compute", choices=DTYPES, help=COMPUTE_HELP)
    add("--gather-format", choices=GATHER_FORMATS, help="send weights in this format. What computes is rounded to it, the masters are not")
    add("--reduce-format", choices=REDUCE_FORMATS, help="send gradients in this format")
    add("--shard", action="store_true", help="zero3.shard() for GPT-NeoX too, as for all other models and --lora")
    add("--generate", metavar="TEXT", help="show how the model goes on from this text, before and after")
    add("--generate-tokens", type=positive, metavar="N", default=40, help="how far it goes on")
    add("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu", help="where to compute")
    add("--timeout", type=positive, metavar="SECONDS", help="how long a process waits for others before it fails (default: torch's)")

    add = parser.add_argument_group("training").add_argument
    add("--steps", type=positive, metavar="N", default=300, help="optimizer steps")
    add("--batch-size", type=positive, metavar="N", default=8, help="sequences a step, of all processes together")
    add("--accumulate", type=positive, metavar="N", default=1, help="backward passes among which a step's sequences are split")
    add("--sequence-length", type=positive, metavar="N", default=128, help="tokens a sequence")
    add("--lr", type=float, metavar="X", help="peak learning rate (default: 3e-3 for the small model, 3e-5 with --model, 3e-4 with --lora)")
    add("--warm-up", type=float, metavar="X", default=0.1, help="share of the steps before lr falls along a cosine")
    add("--optimizer", choices=("adamw", "adamw_8bit"), default="adamw", help="adamw_8bit: moments in eight bits, of bitsandbytes")
    add("--weight-decay", type=float, metavar="X", default=0.01, help="of AdamW")
    add("--max-norm", type=float, metavar="X", default=1.0, help="gradients are clipped to this norm")
    add("--held-out", type=positive, metavar="N", default=64, help="most sequences to measure the held-out loss on")
    add("--seed", type=int, metavar="N", default=0, help="of fresh weights, batches and dropout")

    add = parser.add_argument_group("checkpoints").add_argument
    add("--checkpoint-every", type=positive, metavar="N", help="save everything every N steps; the last two checkpoints are kept")
    add("--checkpoint-dir", type=Path, metavar="DIR", help="where to (default: checkpoints in --output)")
    add("--fast-output", type=Path, metavar="DIR", help="save there too: a directory on each host's own disk; the next host gets a copy")
    add("--fast-every", type=positive, metavar="N", default=10, help="steps between those")
    add("--run", metavar="NAME", help="the name of this run, where directories hold several (default: torchrun's, or a new one)")
    add("--resume", action="store_true", help="go on from the newest checkpoint, with any number of processes; without one, begin")

    add = parser.add_argument_group("the small model, when there is no --model").add_argument
    add("--vocabulary", type=positive, metavar="N", default=2048, help="tokens that its tokenizer learns")
    add("--width", type=positive, metavar="N", default=192, help="length of its hidden states")
    add("--blocks", type=positive, metavar="N", default=6, help="transformer blocks")
    add("--heads", type=positive, metavar="N", default=6, help="attention heads a block")
    return parser


def policy_of(options: argparse.Namespace) -> zero3.ShardingPolicy:
    policy = zero3.ShardingPolicy(
        offload=options.offload,
        gather_format=GATHER_FORMATS.get(options.gather_format),
        reduce_format=REDUCE_FORMATS.get(options.reduce_format),
        quantize=FORMATS.get(options.quantize),
    )
    if options.compute is None:
        return policy
    compute, sums = DTYPES[options.compute], torch.float32  # gradients add up in float32, and so are the logits
    return replace(policy, param_dtype=compute, reduce_dtype=sums, output_dtype=sums)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows the defaults that there are, and keeps the lines of the examples."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, found {text}")
    return number


def trainable(text: str) -> str:
    if not re.fullmatch(r"all|biases|last-\d+", text):
        raise argparse.ArgumentTypeError(f"expected all, biases or last-N, found {text!r}")
    return text
