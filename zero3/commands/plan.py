"""Tells what a training step will hold on each rank, from config.json alone: no weights, no GPU,
one process.

    python -m zero3 plan DIR --ranks 8 --memory 24GiB --sequence 4096

The exit code is 0 if it fits into --memory, 1 if it does not, and 2 if that can't be told: without
--memory, or after an error.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import textwrap
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..planning.cluster import cluster_of
from ..planning.picture import check_target
from ..planning.plan import plan
from ..planning.result import Plan
from ..planning.units import parse_bytes, parse_rate
from ..policy import ShardingPolicy
from ..quantized.formats import MXFP4, NF4, Float8, Int8

__all__: list[str] = []

NAME = "plan"
SUMMARY = "tell whether a training step will fit, and what takes its memory"

_DTYPES = MappingProxyType({"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32})
_FORMATS = MappingProxyType({"nf4": NF4, "int8": Int8, "float8": Float8, "mxfp4": MXFP4})
_OPTIMIZERS = MappingProxyType(
    {name: getattr(torch.optim, name) for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop")}
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="DIR", help="a Hugging Face directory; config.json is enough"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        required=True,
        metavar="N",
        help="ranks that share the model, one a GPU",
    )
    parser.add_argument(
        "--memory", metavar="BYTES", help="what a rank has, such as 24GiB, or 80GB: a card's name"
    )
    parser.add_argument(
        "--sequence", type=int, default=2048, metavar="N", help="tokens in a sequence (%(default)s)"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="sequences in a rank's micro-batch (%(default)s)",
    )
    parser.add_argument(
        "--accumulation",
        type=int,
        default=1,
        metavar="N",
        help="micro-batches in a step (%(default)s)",
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="activation checkpointing in each block"
    )
    parser.add_argument(
        "--lora",
        type=int,
        metavar="RANK",
        help="adapters of this rank, where peft puts them by default",
    )
    parser.add_argument(
        "--quantize", choices=_FORMATS, help="frozen weights are stored in this format"
    )
    parser.add_argument(
        "--offload",
        metavar="WHERE",
        help="chunks rest in host memory (cpu), or in files of this directory",
    )
    _add_policy(parser)
    parser.add_argument(
        "--sp",
        type=int,
        default=1,
        metavar="N",
        help="ranks that hold parts of the same sequences (%(default)s)",
    )
    parser.add_argument(
        "--chunked-head", action="store_true", help="the loss is made without whole logits"
    )
    parser.add_argument(
        "--tile", type=int, metavar="N", help="tokens that a block's inner maps compute at a time"
    )
    parser.add_argument(
        "--images",
        type=int,
        default=0,
        metavar="N",
        help="pictures in a rank's micro-batch; their tokens are a part of the sequences",
    )
    parser.add_argument(
        "--image-size",
        type=int,
        metavar="PIXELS",
        help="the side of each picture (the configuration's, or 1024 where it is free)",
    )
    parser.add_argument("--mesh", metavar="RxS", help="replicas x ranks that share the model")
    parser.add_argument(
        "--rank",
        type=int,
        default=0,
        metavar="N",
        help="the rank to plan for (%(default)s); with gloo ranks differ a little",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="GPUs and NCCL, or CPUs and gloo (%(default)s)",
    )
    parser.add_argument("--gpu", metavar="KIND", help="such as h100, for the time of a step")
    parser.add_argument(
        "--link", metavar="RATE", help="one GPU's bandwidth between nodes, such as 400Gbit"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw the memory of a step into this file"
    )
    parser.add_argument("--json", action="store_true", help="print the same as JSON, for programs")


def _add_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="param_dtype: what parameters are gathered and computed in"
    )
    parser.add_argument(
        "--reduce-dtype", choices=_DTYPES, help="reduce_dtype: what gradients are added up in"
    )
    parser.add_argument(
        "--master-dtype", choices=_DTYPES, help="what parameters are stored in (config.json's)"
    )
    parser.add_argument(
        "--optimizer", choices=_OPTIMIZERS, default="AdamW", help="of torch.optim (%(default)s)"
    )
    parser.add_argument(
        "--stage",
        type=int,
        choices=(1, 2, 3),
        default=3,
        help="what is divided, beside optimizer state (%(default)s)",
    )
    parser.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="reshard_after_forward=False: a layer stays until its backward",
    )
    parser.add_argument(
        "--experts-at-home",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="expert_parallel=True: experts stay on the ranks that own them, tokens travel",
    )
    parser.add_argument(
        "--resident",
        default="0",
        metavar="BYTES",
        help="resident_bytes: frozen parameters that are gathered once, such as 2GiB",
    )
    parser.add_argument(
        "--prefetch-depth",
        type=int,
        default=1,
        metavar="N",
        help="layers gathered ahead (%(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    try:
        if options.picture is not None:
            check_target(options.picture)
        found = _plan(options)
        print(json.dumps(found.as_dict(), indent=2) if options.json else found)
        if found.advice and not options.json:
            print(f"\n{_command(options, found)}")
        sys.stdout.flush()
        if options.picture is not None:
            found.draw(options.picture)
    except Exception as error:  # whatever a model's code raises: 1 would say that it does not fit
        kind = (
            ""
            if isinstance(error, OSError | ValueError | NotImplementedError)
            else f"{type(error).__name__}: "
        )
        print(
            f"zero3: {kind}{textwrap.shorten(str(error), 1000, placeholder=' ...')}",
            file=sys.stderr,
        )
        return 2
    return 2 if found.fits is None else int(not found.fits)


def _plan(options: argparse.Namespace) -> Plan:
    if (options.gpu is None) is not (options.link is None):
        raise ValueError("--gpu and --link go together: the time of a step needs both")
    if options.quantize is not None and options.lora is None:
        raise ValueError(
            f"--quantize {options.quantize} is for frozen weights, and here all train: add --lora "
            "RANK, or leave it out"
        )
    cluster = (
        None if options.gpu is None else cluster_of(options.gpu, parse_rate(options.link, "--link"))
    )
    return plan(
        options.model,
        cluster=cluster,
        ranks=options.ranks,
        batch=options.batch,
        sequence=options.sequence,
        policy=_policy(options),
        memory=options.memory,
        checkpointing=options.checkpointing,
        optimizer=_OPTIMIZERS[options.optimizer],
        accumulation=options.accumulation,
        lora=options.lora,
        device=options.device,
        master_dtype=_DTYPES.get(options.master_dtype),
        mesh=None if options.mesh is None else _mesh_of(options.mesh),
        rank=options.rank,
        sequence_parallel=options.sp,
        chunked_head=options.chunked_head,
        tile=options.tile,
        images=options.images,
        image_size=options.image_size,
    )


def _mesh_of(text: str) -> tuple[int, int]:
    replicas, _, shards = text.partition("x")
    if not (replicas.isdecimal() and shards.isdecimal()):
        raise ValueError(
            f"--mesh must be such as 2x4, replicas x ranks that share the model, found {text!r}"
        )
    return int(replicas), int(shards)


def _policy(options: argparse.Namespace) -> ShardingPolicy:
    return ShardingPolicy(
        quantize=None if options.quantize is None else _FORMATS[options.quantize](),
        param_dtype=_DTYPES.get(options.dtype),
        reduce_dtype=_DTYPES.get(options.reduce_dtype),
        stage=options.stage,
        reshard_after_forward=not options.keep,
        prefetch_depth=options.prefetch_depth,
        offload=options.offload,
        resident_bytes=parse_bytes(options.resident, "--resident", least=0),
        expert_parallel=options.experts_at_home,
    )


def _command(options: argparse.Namespace, found: Plan) -> str:
    """The command line with the advice in it."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    advised = parser.parse_args(
        [str(options.model), "--ranks", str(options.ranks), *found.advice],
        argparse.Namespace(**vars(options)),
    )
    words: list[Any] = [options.model]
    for action in parser._actions:
        value = getattr(advised, action.dest, None)
        # 0 is a number, and equal to False
        is_given = value is not False and value != action.default
        if is_given and action.option_strings and action.dest not in ("help", "json", "picture"):
            words += [action.option_strings[0], *([] if value is True else [value])]
    return shlex.join(["python", "-m", "zero3", "plan", *map(str, words)])
