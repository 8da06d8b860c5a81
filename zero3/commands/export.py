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
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ..checkpoint import file_operations, manifest
from ..checkpoint.full_state import check_dtype, converted
from ..checkpoint.lazy import Lazy
from ..checkpoint.progress import progress
from ..checkpoint.ranges import Ranges
from ..checkpoint.safetensors_files import INDEX, SafetensorsFiles
from ..checkpoint.safetensors_writing import as_file
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
        manifest.verify(found, names, advance=advance)
    with file_operations.becoming(options.output) as temporary:
        file_operations.make_directory(temporary)
        _write_all(found, shards, temporary, options.beside)
    if extra := found.content["extra_states"]:
        print(
            f"zero3: safetensors files hold tensors only, so this was left out: {', '.join(extra)}",
            file=sys.stderr,
        )
    tensors = sum(len(shard) for shard in shards.values())
    files = f"{len(shards)} file{'s' if len(shards) > 1 else ''}"
    print(f"{options.output}: {tensors} tensors in {files}")


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
        own, shape = dtype_named(described["dtype"]), tuple(described["shape"])
        to = converted(own, dtype)
        output = Output(name.removeprefix(options.strip), to, shape, Whole(name, shape))
        if (other := outputs.setdefault(output.name, output)) is not output:
            raise ValueError(
                f"--strip {options.strip} makes one name, {output.name!r}, of "
                f"{other.index_map.sources[0]!r} and {name!r}"
            )
    stripped = (name for name in found.content["tensors"] if name.startswith(options.strip))
    if options.strip and not any(stripped):
        raise ValueError(
            f"--strip {options.strip}: no name begins with it; the first is "
            f"{next(iter(outputs), 'none')!r}"
        )
    return shards_of(outputs.values(), bytes_in(options.max_shard_size))


def _converted(found: manifest.Manifest, ranges: Ranges, output: Output) -> Lazy:
    """A tensor of the checkpoint, which is converted when it is read."""
    (name,) = output.index_map.sources
    own = found.content["tensors"][name]["dtype"]
    return replace(ranges.tensor("parameter", name, output.shape, own), dtype=output.dtype)


def _write_all(
    found: manifest.Manifest, shards: dict[str, list[Output]], directory: Path, beside: Path | None
) -> None:
    total = sum(output.nbytes for shard in shards.values() for output in shard)
    with (
        closing(SafetensorsFiles(found.data, found.names("model"))) as files,
        progress(total, "writing") as advance,
    ):
        ranges = Ranges(files)
        for file, shard in shards.items():
            tensors = {output.name: _converted(found, ranges, output) for output in shard}
            with file_operations.writing(directory / file) as opened:
                for view in as_file(tensors, {"format": "pt"}, advance):
                    file_operations.write(opened, [view])
    if len(shards) > 1:
        (directory / INDEX).write_text(index_of(shards))
    if found.content["config"] is not None:
        text = json.dumps(found.content["config"], indent=2, sort_keys=True) + "\n"
        (directory / "config.json").write_text(text)
    left_out = (".safetensors", ".bin", ".index.json", ".pt", ".pth")
    for path in sorted(beside.iterdir()) if beside is not None else []:
        if path.is_file() and not path.name.endswith(left_out):
            shutil.copyfile(path, directory / path.name)
