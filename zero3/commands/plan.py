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
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..planning.cluster import cluster_of
from ..planning.plan import plan
from ..planning.result import Plan, check_target
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
_AS_GIVEN = (
    "ranks", "batch", "sequence", "memory", "checkpointing", "accumulation", "lora", "device",
    "rank", "chunked_head", "tile", "images", "image_size",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    number = partial(add, type=int, metavar="N")
    add("model", type=Path, metavar="DIR", help="a Hugging Face directory; config.json is enough")
    number("--ranks", required=True, help="ranks that share the model, one a GPU")
    add("--memory", metavar="BYTES", help="what a rank has, such as 24GiB, or 80GB: a card's name")
    number("--sequence", default=2048, help="tokens in a sequence (%(default)s)")
    number("--batch", default=1, help="sequences in a rank's micro-batch (%(default)s)")
    number("--accumulation", default=1, help="micro-batches in a step (%(default)s)")
    add("--checkpointing", action="store_true", help="activation checkpointing in each block")
    number("--lora", metavar="RANK", help="adapters of this rank, where peft puts them by default")
    add("--quantize", choices=_FORMATS, help="frozen weights are stored in this format")
    offload = "chunks rest in host memory (cpu), or in files of this directory"
    add("--offload", metavar="WHERE", help=offload)
    _add_policy(parser)
    number("--sp", default=1, help="ranks that hold parts of the same sequences (%(default)s)")
    add("--chunked-head", action="store_true", help="the loss is made without whole logits")
    number("--tile", help="tokens that a block's inner maps compute at a time")
    images = "pictures in a rank's micro-batch; their tokens are a part of the sequences"
    number("--images", default=0, help=images)
    side = "the side of each picture (the configuration's, or 1024 where it is free)"
    number("--image-size", metavar="PIXELS", help=side)
    add("--mesh", metavar="RxS", help="replicas x ranks that share the model")
    rank = "the rank to plan for (%(default)s); with gloo ranks differ a little"
    number("--rank", default=0, help=rank)
    device = "GPUs and NCCL, or CPUs and gloo (%(default)s)"
    add("--device", choices=("cuda", "cpu"), default="cuda", help=device)
    add("--gpu", metavar="KIND", help="such as h100, for the time of a step")
    add("--link", metavar="RATE", help="one GPU's bandwidth between nodes, such as 400Gbit")
    add("--picture", type=Path, metavar="FILE", help="draw the memory of a step into this file")
    add("--json", action="store_true", help="print the same as JSON, for programs")


def _add_policy(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    switch = partial(add, action=argparse.BooleanOptionalAction, default=False)
    add(
        "--dtype", choices=_DTYPES, help="param_dtype: what parameters are gathered and computed in"
    )
    add("--reduce-dtype", choices=_DTYPES, help="reduce_dtype: what gradients are added up in")
    masters = "what parameters are stored in (config.json's)"
    add("--master-dtype", choices=_DTYPES, help=masters)
    add("--optimizer", choices=_OPTIMIZERS, default="AdamW", help="of torch.optim (%(default)s)")
    stage = "what is divided, beside optimizer state (%(default)s)"
    add("--stage", type=int, choices=(1, 2, 3), default=3, help=stage)
    switch("--keep", help="reshard_after_forward=False: a layer stays until its backward")
    at_home = "expert_parallel=True: experts stay on the ranks that own them, tokens travel"
    switch("--experts-at-home", help=at_home)
    resident = "resident_bytes: frozen parameters that are gathered once, such as 2GiB"
    add("--resident", default="0", metavar="BYTES", help=resident)
    depth = "layers gathered ahead (%(default)s)"
    add("--prefetch-depth", type=int, default=1, metavar="N", help=depth)


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
        told = isinstance(error, OSError | ValueError | NotImplementedError)
        kind = "" if told else f"{type(error).__name__}: "
        why = textwrap.shorten(str(error), 1000, placeholder=" ...")
        print(f"zero3: {kind}{why}", file=sys.stderr)
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
    cluster = None
    if options.gpu is not None:
        cluster = cluster_of(options.gpu, parse_rate(options.link, "--link"))
    return plan(
        options.model,
        cluster=cluster,
        policy=_policy(options),
        optimizer=_OPTIMIZERS[options.optimizer],
        master_dtype=_DTYPES.get(options.master_dtype),
        mesh=None if options.mesh is None else _mesh_of(options.mesh),
        sequence_parallel=options.sp,
        **{name: getattr(options, name) for name in _AS_GIVEN},
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
