"""Turns a checkpoint of one system into another's: zero3's, torch.distributed.checkpoint's (FSDP2),
DeepSpeed ZeRO-3's, torch's one file.

IN is a zero3 checkpoint, a directory of torch.distributed.checkpoint, of DeepSpeed (the one with
`latest` in it, or one of its steps), or a file of torch.save: which of them it is, is found out.
Model, optimizer and everything beside them go along, by the parameters' names. One process, which
holds some tens of MB. Nothing is unpickled.

What OUT can't hold is left out, key by key: objects of other systems' classes, random generators,
and the like. One line on stderr names each of them; a value with its path and its type. With
--strict that is an error (exit code 1), which leaves no OUT.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from ..checkpoint import file_operations
from ..checkpoint.progress import progress
from ..formats import dcp, deepspeed, ours, torch_full
from ..formats.run import Run

__all__: list[str] = []

NAME = "convert"
SUMMARY = "turn a checkpoint of FSDP2, DeepSpeed or plain torch into zero3's, or back"

_FORMATS = MappingProxyType(
    {"zero3": ours, "dcp": dcp, "deepspeed": deepspeed, "torch": torch_full}
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("input", type=Path, metavar="IN", help="a checkpoint of any of the four systems")
    add("output", type=Path, metavar="OUT", help="a path where nothing is yet")
    kinds = ["zero3", "torch", "dcp", "deepspeed"]
    add("--to", choices=kinds, default="zero3", help="default: %(default)s")
    ranks = "that load what is for DeepSpeed (default: as many as have written IN)"
    add("--ranks", type=int, metavar="N", help=ranks)
    add("--strict", action="store_true", help="what can't go along is an error, and not left out")


def run(options: argparse.Namespace) -> None:
    """What fails leaves no OUT."""
    _check_output(options)
    try:
        with ExitStack() as files:
            found = _read(options.input, files)
            found.check()
            found.leave_out(_FORMATS[options.to].HOLDS)
            left_out = ", ".join(found.left_out)
            missed = f"{options.to} checkpoints can't hold these, or not yet: {left_out}"
            if found.left_out and options.strict:
                raise ValueError(f"--strict: {missed}")
            _write(replace(found, ranks_asked_for=options.ranks), options)
    except (AttributeError, LookupError, OverflowError, RecursionError, TypeError) as error:
        # a file may say anything; who reads it trips over what is not as its system writes it
        raise ValueError(
            f"{options.input} is malformed, or can't be converted: {type(error).__name__}: {error}"
        ) from error
    if found.left_out:
        print(f"zero3: {missed}", file=sys.stderr)
    state = f"{len(found.state)} with optimizer state"
    state = state if found.groups is not None else "no optimizer"
    print(
        f"{options.output}: {found.kind} to {options.to}, {len(found.tensors)} tensors, {state}, "
        f"{found.nbytes:,} bytes"
    )


def _write(found: Run, options: argparse.Namespace) -> None:
    with (
        file_operations.becoming(options.output) as temporary,
        progress(found.nbytes, "writing") as advance,
    ):
        _FORMATS[options.to].write(found, temporary, advance)


def _check_output(options: argparse.Namespace) -> None:
    if os.path.lexists(options.output):
        raise ValueError(f"{options.output} is there already: OUT must be a path where nothing is")
    if not (parent := options.output.absolute().parent).is_dir():
        raise ValueError(f"{options.output} can't be made: {parent} is no directory")
    if options.ranks is not None and (options.to != "deepspeed" or options.ranks < 1):
        raise ValueError(
            f"--ranks {options.ranks}: it is a number from 1 up, and goes with --to deepspeed; "
            "the others load on any number"
        )


def _read(path: Path, files: ExitStack) -> Run:
    for format_ in _FORMATS.values():
        if format_.is_one(path):
            with progress(_bytes_of(path), "looking through") as advance:
                found: Run = format_.read(path, files, advance)
                return found
    there = ", ".join(file_operations.names_in(path)[:8]) or "nothing"
    there = there if path.is_dir() else "no such file or directory"
    raise ValueError(
        f"{path} is no checkpoint of zero3, torch.distributed.checkpoint, DeepSpeed ZeRO-3 or "
        f"torch.save (found {there})"
    )


def _bytes_of(path: Path) -> int:
    """In a directory. Of a file, which is not looked through: 0."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
