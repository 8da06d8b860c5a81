"""Writes safetensors files as a stream: the header first, then bytes from the tensors' memory. A
thread hashes them meanwhile.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import file_operations
from .lazy import Lazy, bytes_of, resolved
from .safetensors_files import DTYPES, LONGEST_HEADER, UNNAMED

__all__: list[str] = []

# of a file have one hash; the copy of a device's tensors on the CPU takes no more at a time
BLOCK_BYTES = 1 << 24


class Written(NamedTuple):
    """A file's size and the sha256 of each of its blocks."""

    nbytes: int
    blocks: list[str]


def header_of(
    tensors: Mapping[str, Any], metadata: Mapping[str, str], *, ours: bool = False
) -> bytes:
    """Returns the first bytes of a file that holds `tensors` in this order, up to the first value.
    Of each the `dtype` and the `shape` count.

    `ours`: the file is part of a checkpoint, which may hold dtypes that the format does not know.
    Raises ValueError if the format has no name for a dtype, or the header is longer than it allows.
    """
    known = {dtype: name for name, dtype in DTYPES + UNNAMED * ours}
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        if (dtype := tensor.dtype) not in known:
            instead = "use zero3.save_checkpoint, or torch.save(zero3.full_state_dict(model), ...)"
            raise ValueError(
                f"{name} is {dtype}, for which safetensors files have no name: {instead}"
            )
        shape = list(tensor.shape)
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": known[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that values are aligned
    if len(text) > LONGEST_HEADER:
        raise ValueError(f"a header of {len(text)} bytes, the format allows {LONGEST_HEADER}")
    return len(text).to_bytes(8, "little") + text


def write_hashed(file: FileIO, views: Iterable[memoryview]) -> Written:
    """Writes the bytes of `views` in order into an empty file, and does not sync it. A view may
    change only when two blocks have been written after it.
    """
    nbytes, hashes = 0, list[Future[str]]()
    with ThreadPoolExecutor(1) as hasher:
        for block in _blocks(views):
            hashes.append(hasher.submit(_hash, block))
            file_operations.write(file, block)
            nbytes += sum(map(len, block))
            if len(hashes) > 1:  # the thread is one block behind at most: memory is bounded
                hashes[-2].result()
    return Written(nbytes, [each.result() for each in hashes])


def as_file(
    tensors: Mapping[str, Tensor | Lazy],
    metadata: Mapping[str, str],
    advance: Callable[[int], object] = lambda nbytes: None,
    *,
    ours: bool = False,
) -> Iterator[memoryview]:
    """The bytes of a file. Tensors in host memory are not copied. `ours`: see `header_of`."""
    yield memoryview(header_of(tensors, metadata, ours=ours))
    for tensor in tensors.values():
        for piece in tensor.pieces() if isinstance(tensor, Lazy) else _pieces(tensor):
            yield piece
            advance(len(piece))


def write_text(path: Path, text: str, token: str) -> None:
    """Writes a small file under a temporary name, which ends with `token`, and renames it when it
    is on the disk.
    """
    temporary = path.with_name(f"{path.name}.{token}")
    with file_operations.writing(temporary) as file:
        file_operations.write(file, [memoryview(text.encode())])
    file_operations.replace(temporary, path)


def _hash(views: list[memoryview]) -> str:
    digest = sha256()
    for view in views:
        digest.update(view)
    return digest.hexdigest()


def _blocks(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yields the file's bytes, `BLOCK_BYTES` at a time."""
    block: list[memoryview] = []
    room = BLOCK_BYTES
    for view in views:
        while view:
            block.append(view[:room])
            view, room = view[room:], room - len(block[-1])
            if not room:
                yield block
                block, room = [], BLOCK_BYTES
    if block:
        yield block


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    flat = resolved(tensor.detach().reshape(-1))
    if flat.device.type == "cpu":
        yield bytes_of(flat)
        return
    for piece in torch.split(flat, BLOCK_BYTES // flat.dtype.itemsize):
        yield bytes_of(piece.cpu())
