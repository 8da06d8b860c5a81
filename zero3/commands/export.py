"""Turns a checkpoint into a Hugging Face directory: safetensors under the model's own names, their index, config.json.

One process, which holds a few MB at a time, whatever the number of ranks that wrote the checkpoint. Hashes are compared
first. A tied parameter is written once, under its first name. Names are those of the model that was saved; where
transformers gives files other names (experts), save_pretrained in a training script does so too.

Any number of ranks can load a checkpoint as it is, so there is no command that converts between them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from ..checkpoint import file_operations, manifest
from ..checkpoint.ranges import Ranges
from ..checkpoint.safetensors_files import STAGE_BYTES, SafetensorsFiles, bytes_of
from ..checkpoint.safetensors_writing import header_of
from ..comm.plain_values import dtype_named
from ..huggingface.outputs import Output, bytes_in, index_of, shards_of
from .progress import progress

__all__: list[str] = []

NAME = "export"
SUMMARY = "write a checkpoint's model as Hugging Face safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CKPT", help="the directory that save_checkpoint wrote")
    parser.add_argument("output", type=Path, metavar="OUT", help="a directory that is not there yet, or is empty")
    parser.add_argument("--dtype", metavar="NAME", help="convert floating tensors, e.g. to bfloat16")
    parser.add_argument("--max-shard-size", metavar="SIZE", default="5GB", help="of one file (default: %(default)s)")
    parser.add_argument("--beside", type=Path, metavar="DIR", help="copy config and tokenizer files from this directory")
    parser.add_argument("--strip", metavar="PREFIX", default="", help="take this off the beginning of names")


def run(options: argparse.Namespace) -> None:
    found = manifest.read(options.checkpoint)
    if left_out := [name for name, described in found.content["tensors"].items() if not described["stored"]]:
        raise ValueError(f"{options.checkpoint} was saved with frozen=False, without {len(left_out)} parameters ({left_out[0]}, ...)")
    if file_operations.names_in(options.output):
        raise ValueError(f"{options.output} is not empty")
    dtype = dtype_named(options.dtype) if options.dtype is not None else None
    outputs = []
    for name, described in found.content["tensors"].items():
        own = dtype_named(described["dtype"])
        to = dtype if dtype is not None and own.is_floating_point else own
        outputs.append(Output(name.removeprefix(options.strip), to, tuple(described["shape"]), name, 0))
    shards = shards_of(outputs, bytes_in(options.max_shard_size), "model")
    names = found.names("model")
    total = sum(found.files[name].nbytes for name in names)
    with progress(total, "verifying") as advance:
        for name in names:
            advance(manifest.verify(found, [name], 0, 1))
    temporary = options.output.with_name(f"{options.output.name}.unfinished")
    file_operations.remove(temporary)
    file_operations.make_directory(temporary)
    files = SafetensorsFiles(found.data, names)
    try:
        with progress(sum(output.nbytes for output in outputs), "writing") as advance:
            for file, shard in shards.items():
                _write(files, temporary / file, shard, advance)
    finally:
        files.close()
    if len(shards) > 1:
        (temporary / "model.safetensors.index.json").write_text(index_of(shards))
    if found.content["config"] is not None:
        (temporary / "config.json").write_text(json.dumps(found.content["config"], indent=2, sort_keys=True) + "\n")
    if options.beside is not None:
        for path in sorted(options.beside.iterdir()):
            if path.is_file() and not path.name.endswith((".safetensors", ".bin", ".index.json", ".pt", ".pth")):
                shutil.copyfile(path, temporary / path.name)
    if options.output.is_dir():
        options.output.rmdir()
    os.replace(temporary, options.output)
    print(f"{options.output}: {len(outputs)} tensors in {len(shards)} file{'s' if len(shards) > 1 else ''}")


def _write(files: SafetensorsFiles, path: Path, shard: list[Output], advance: Callable[[int], object]) -> None:
    ranges = Ranges(files)
    header = header_of(((output.name, output.dtype, output.shape) for output in shard), {"format": "pt"})
    stage = torch.empty(STAGE_BYTES, dtype=torch.uint8)
    with file_operations.create(path) as opened:
        file_operations.write(opened, [memoryview(header)])
        for output in shard:
            step = STAGE_BYTES // 8
            for start in range(0, output.numel, step):
                values = stage[: step * output.dtype.itemsize].view(output.dtype)[: output.numel - start]
                if (whole := files.tensors.get(f"other:0:{output.source}")) is not None:
                    files.read(whole, start, values)
                else:
                    ranges.read("parameter", output.source, start, values)
                file_operations.write(opened, [bytes_of(values)])
                advance(values.nbytes)
        file_operations.sync(opened)
