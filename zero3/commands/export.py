"""Turns a checkpoint into a Hugging Face directory: safetensors under the model's own names, their
index, config.json.

One process does it, and holds a few MB at a time, for any number of ranks that wrote the
checkpoint. It compares hashes first. A tied parameter is written once, under its first name. Names
are those of the model that was saved. (For some models, such as those with experts, transformers
has other names in files: save_pretrained in a training script writes these.)

Any number of ranks can load a checkpoint as it is, so no command converts between numbers of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ..checkpoint import file_operations, manifest
from ..checkpoint.full_state import check_dtype
from ..checkpoint.progress import progress
from ..checkpoint.ranges import Ranges
from ..checkpoint.safetensors_files import STAGE_BYTES, SafetensorsFiles, bytes_of
from ..checkpoint.safetensors_writing import header_of
from ..comm.plain_values import dtype_named
from ..huggingface.index_maps import Whole
from ..huggingface.outputs import Output, bytes_in, index_of, shards_of

__all__: list[str] = []

NAME = "export"
SUMMARY = "write a checkpoint's model as Hugging Face safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CKPT", help="the directory that save_checkpoint wrote")
    add("output", type=Path, metavar="OUT", help="a directory that is not there yet, or is empty")
    add("--dtype", metavar="NAME", help="convert floating tensors, e.g. to bfloat16")
    size = "of one file (default: %(default)s)"
    add("--max-shard-size", metavar="SIZE", default="5GB", help=size)
    beside = "copy config and tokenizer files from this directory"
    add("--beside", type=Path, metavar="DIR", help=beside)
    add("--strip", metavar="PREFIX", default="", help="take this off the beginning of names")


def run(options: argparse.Namespace) -> None:
    """Finds all mistakes before it writes a byte. If it fails later, it leaves no file."""
    _check_places(options)
    found = manifest.read(options.checkpoint)
    with manifest.reading(found):
        shards = _planned(found, options)
    names = found.names("model")
    with progress(sum(found.files[name].nbytes for name in names), "verifying") as advance:
        for name in names:
            advance(manifest.verify(found, [name], 0, 1))
    with file_operations.becoming(options.output) as temporary:
        file_operations.make_directory(temporary)
        _write_all(found, shards, temporary, options.beside)
    if extra := found.content["extra_states"]:
        print(
            f"zero3: safetensors files hold tensors only, so this was left out: {', '.join(extra)}",
            file=sys.stderr,
        )
    tensors = sum(len(shard) for shard in shards.values())
    print(
        f"{options.output}: {tensors} tensors in {len(shards)} file{'s' if len(shards) > 1 else ''}"
    )


def _check_places(options: argparse.Namespace) -> None:
    output, beside = options.output, options.beside
    if os.path.lexists(output) and not output.is_dir():
        raise ValueError(
            f"{output} is there already and no directory: OUT must be a directory that is not "
            "there yet, or is empty"
        )
    if file_operations.names_in(output):
        raise ValueError(f"{output} is not empty")
    parent = next(path for path in output.absolute().parents if os.path.lexists(path))
    if not parent.is_dir():
        raise ValueError(f"{output} can't be made: {parent} is no directory")
    if beside is not None and not beside.is_dir():
        raise ValueError(f"--beside {beside}: there is no such directory")


def _planned(found: manifest.Manifest, options: argparse.Namespace) -> dict[str, list[Output]]:
    """Returns the tensors of each file that the options ask for."""
    found.check_values()
    dtype = dtype_named(options.dtype) if options.dtype is not None else None
    try:
        check_dtype(dtype)
    except ValueError as error:
        raise ValueError(f"--dtype {options.dtype}: {error}") from None
    outputs: dict[str, Output] = {}
    for name, described in found.content["tensors"].items():
        own = dtype_named(described["dtype"])
        to = dtype if dtype is not None and own.is_floating_point else own
        output = Output(
            name.removeprefix(options.strip),
            to,
            tuple(described["shape"]),
            Whole(name, described["shape"]),
        )
        if (other := outputs.setdefault(output.name, output)) is not output:
            raise ValueError(
                f"--strip {options.strip} makes one name, {output.name!r}, of "
                f"{other.index_map.sources[0]!r} and {name!r}"
            )
    if options.strip and not any(
        name.startswith(options.strip) for name in found.content["tensors"]
    ):
        raise ValueError(
            f"--strip {options.strip}: no name begins with it; the first is "
            f"{next(iter(outputs), 'none')!r}"
        )
    return shards_of(outputs.values(), bytes_in(options.max_shard_size))


def _write_all(
    found: manifest.Manifest, shards: dict[str, list[Output]], directory: Path, beside: Path | None
) -> None:
    files = SafetensorsFiles(found.data, found.names("model"))
    try:
        with progress(
            sum(output.nbytes for shard in shards.values() for output in shard), "writing"
        ) as advance:
            for file, shard in shards.items():
                _write(files, directory / file, shard, advance)
    finally:
        files.close()
    if len(shards) > 1:
        (directory / "model.safetensors.index.json").write_text(index_of(shards))
    if found.content["config"] is not None:
        (directory / "config.json").write_text(
            json.dumps(found.content["config"], indent=2, sort_keys=True) + "\n"
        )
    for path in sorted(beside.iterdir()) if beside is not None else []:
        if path.is_file() and not path.name.endswith(
            (".safetensors", ".bin", ".index.json", ".pt", ".pth")
        ):
            shutil.copyfile(path, directory / path.name)


def _write(
    files: SafetensorsFiles, path: Path, shard: list[Output], advance: Callable[[int], object]
) -> None:
    ranges = Ranges(files)
    header = header_of(
        ((output.name, output.dtype, output.shape) for output in shard), {"format": "pt"}
    )
    stage = torch.empty(STAGE_BYTES, dtype=torch.uint8)
    with file_operations.create(path) as opened:
        file_operations.write(opened, [memoryview(header)])
        for output in shard:
            step, (source,) = STAGE_BYTES // 8, output.index_map.sources
            for start in range(0, output.numel, step):
                values = stage[: step * output.dtype.itemsize].view(output.dtype)[
                    : output.numel - start
                ]
                ranges.read("parameter", source, start, values)
                file_operations.write(opened, [bytes_of(values)])
                advance(values.nbytes)
        file_operations.sync(opened)
