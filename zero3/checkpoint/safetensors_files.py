"""Reads ranges of tensors from safetensors files. Headers are checked before they are used.

A file begins with 8 bytes that hold the header's length (little-endian). The header follows, as
JSON with each tensor's dtype, shape and `data_offsets`. Then the tensors' bytes follow, row-major,
without gaps. The safetensors package slices along dimensions, but a chunk is a range of a flattened
tensor. So this file reads by itself. https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .lazy import STAGE_BYTES, Lazy, bytes_of

__all__: list[str] = []

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LONGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors package
_INCOMPLETE = "the download may be incomplete"

# the format's names
DTYPES = (
    ("BOOL", torch.bool), ("U8", torch.uint8), ("I8", torch.int8), ("U16", torch.uint16),
    ("I16", torch.int16), ("U32", torch.uint32), ("I32", torch.int32), ("U64", torch.uint64),
    ("I64", torch.int64), ("F16", torch.float16), ("BF16", torch.bfloat16), ("F32", torch.float32),
    ("F64", torch.float64), ("C64", torch.complex64), ("F8_E4M3", torch.float8_e4m3fn),
    ("F8_E5M2", torch.float8_e5m2), ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
    ("F8_E5M2FNUZ", torch.float8_e5m2fnuz), ("F8_E8M0", torch.float8_e8m0fnu),
)  # fmt: skip
_HAVE_NO_NAME = (  # the second is new in torch 2.15
    "complex32", "bcomplex32", "complex128", "float4_e2m1fn_x2",
    "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2",
)  # fmt: skip
# in checkpoints, which this project alone reads, they have torch's
UNNAMED: tuple[tuple[str, torch.dtype], ...] = tuple(
    (f"torch.{name}", getattr(torch, name)) for name in _HAVE_NO_NAME if hasattr(torch, name)
)


class SafetensorsFiles:
    """The open files of a checkpoint directory. All headers have been read and checked. The caller
    closes it.

    Args:
        path: The directory.
        names: The names of the files. None: the files that a Hugging Face directory names.

    Raises:
        ValueError: The directory has no safetensors, or an index or a header is not as the format
            asks for.
        TypeError: `path` is no path.
        OSError: The file system reports an error.
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
        self.directory = Path(path)
        self.tensors: dict[str, Lazy] = {}  # whose `read` converts to any dtype and device
        self.metadata: dict[str, dict[str, str]] = {}  # of each file
        self._files: dict[str, FileIO] = {}
        # a line for each file; ranks that see the same files have the same lines
        self.listing: list[str] = []
        self._stage = bytearray()
        if sys.byteorder != "little":
            raise ValueError("safetensors files are little-endian, this machine is not")
        try:
            names, index = _names_of_files(self.directory) if names is None else (list(names), {})
            for name in names:
                self._add(name)
            for tensor, name in index.items():
                if tensor not in self.tensors or self.tensors[tensor].file != name:
                    raise ValueError(
                        f"{self.directory / INDEX} says that {tensor!r} is in {name}, where it is "
                        f"not: {_INCOMPLETE}"
                    )
        except BaseException:
            self.close()
            raise

    def _add(self, name: str) -> None:
        path = self.directory / name
        if not path.is_file():
            raise ValueError(
                f"{path} is named by the index, but there is no such file: {_INCOMPLETE}"
            )
        file = self._files[name] = FileIO(os.fspath(path))
        header, self.metadata[name], tensors = _read_header(file, path)
        self.listing.append(
            f"{name}: {os.fstat(file.fileno()).st_size} bytes, header "
            f"{sha256(header).hexdigest()[:16]}"
        )
        for key, (dtype, shape, offset) in tensors.items():
            if key in self.tensors:
                raise ValueError(
                    f"{key!r} is in {self.tensors[key].file} and again in {name}: expected every "
                    f"name once in {self.directory}"
                )
            read = partial(self._read, key, name, dtype, offset)
            self.tensors[key] = Lazy(dtype, shape, read, key, name)

    def _read(
        self, name: str, file: str, dtype: torch.dtype, offset: int, start: int, target: Tensor
    ) -> None:
        """Reads elements `[start, start + n)` of the tensor whose first byte is at `offset`.

        It reads into the target's memory if dtype and device allow that, and otherwise through a
        buffer of a few MB. Raises RuntimeError if the file ends early.
        """
        size = dtype.itemsize
        alike = target.dtype == dtype != torch.bool
        if alike and target.device.type == "cpu" and target.is_contiguous():
            self._fill(name, file, offset + start * size, bytes_of(target))
            return
        if not self._stage:
            self._stage = bytearray(STAGE_BYTES)
        # A bool of torch must be 0 or 1, and a file may hold any byte. The conversion from uint8
        # gives 0 or 1.
        dtype = torch.uint8 if dtype == torch.bool else dtype
        step = STAGE_BYTES // size
        for done in range(0, target.numel(), step):
            count = min(step, target.numel() - done)
            staged = memoryview(self._stage)[: count * size]
            self._fill(name, file, offset + (start + done) * size, staged)
            target[done : done + count].copy_(torch.frombuffer(staged, dtype=dtype))

    def _fill(self, name: str, file: str, offset: int, view: memoryview) -> None:
        if fill(self._files[file], offset, view) < len(view):
            raise RuntimeError(
                f"{self.directory / file} ended within {name!r}: was it replaced meanwhile?"
            )

    def leave_out(self, names: Iterable[str]) -> None:
        """From now on these files can't be read."""
        for name in names:
            if (file := self._files.pop(name, None)) is not None:
                file.close()

    def close(self) -> None:
        self._stage = bytearray()  # tensors refer to this object, and it to them
        for file in self._files.values():
            file.close()


def read_bytes(file: FileIO, offset: int, into: memoryview) -> int:
    """Reads tensors' bytes; no other function does. It may read less than the caller wants, and
    reads 0 at the file's end.
    """
    file.seek(offset)
    return file.readinto(into) or 0


def fill(file: FileIO, offset: int, buffer: memoryview) -> int:
    """Reads until the buffer is full, or the file ends. Returns how many bytes it has read."""
    filled = 0
    while filled < len(buffer) and (count := read_bytes(file, offset + filled, buffer[filled:])):
        filled += count
    return filled


def _names_of_files(directory: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the files, and the index, which maps each tensor to its file ({} if there is no
    index).
    """
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory: expected one with {SINGLE}, or {INDEX} and the "
            "files that it names"
        )
    if (directory / SINGLE).is_file():
        return [SINGLE], {}
    if not (directory / INDEX).is_file():
        found = ", ".join(sorted(entry.name for entry in directory.iterdir())[:12]) or "nothing"
        remedy = "save the model with save_pretrained, which writes safetensors"
        raise ValueError(f"{directory} holds neither {SINGLE} nor {INDEX}, found {found}: {remedy}")
    index = _parse((directory / INDEX).read_bytes(), directory / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"{directory / INDEX}: weight_map must be an object that names a file for each tensor"
        )
    for tensor, name in weight_map.items():
        if (
            not isinstance(name, str)
            or any(mark in name for mark in "/\\\0")
            or not name.endswith(".safetensors")
        ):
            raise ValueError(
                f"{directory / INDEX}: {tensor!r} is said to be in {name!r}, expected a "
                ".safetensors file beside it"
            )
    return sorted(set(weight_map.values())), weight_map


# a tensor's dtype, its shape, and the place of its first byte
_Place = tuple[torch.dtype, tuple[int, ...], int]


def _read_header(file: FileIO, path: Path) -> tuple[bytes, dict[str, str], dict[str, _Place]]:
    size = os.fstat(file.fileno()).st_size
    stream = BufferedReader(file)  # one raw read may return less than is asked for
    length = int.from_bytes(stream.read(8), "little") if size >= 8 else 0
    if size < 8 or 8 + length > size:
        raise ValueError(f"{path} is cut off: {size} bytes, its header alone ends at {8 + length}")
    if length > LONGEST_HEADER:
        raise ValueError(
            f"{path}: a header of {length} bytes, the format allows {LONGEST_HEADER}: not a "
            "safetensors file"
        )
    header = stream.read(length)
    stream.detach()
    entries = _parse(header, path)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError(
            f"{path}: __metadata__ must map strings to strings, found {metadata!r:.80}"
        )
    tensors = {key: _place_of(key, entry, path, 8 + length) for key, entry in entries.items()}
    _check_spans(tensors, path, 8 + length, size)
    return header, metadata, tensors


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    def without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"the name {name!r} stands there twice")
        return found

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=without_repetitions)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is corrupt, its header is not the JSON that the format asks for: {error}"
        ) from None
    if not isinstance(parsed, dict):
        raise ValueError(
            f"{path} is corrupt: expected a JSON object, found {type(parsed).__name__}"
        )
    return parsed


def _place_of(key: str, entry: Any, path: Path, begin: int) -> _Place:
    dtypes = dict(DTYPES + UNNAMED)
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(
            f"{path} is corrupt: {key!r} must have dtype, shape and data_offsets, found "
            f"{entry!r:.80}"
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(entry["dtype"], str) or entry["dtype"] not in dtypes:
        raise ValueError(
            f"{path}: {key!r} has the dtype {entry['dtype']!r:.40}, which can't be read; known "
            f"are {', '.join(dict(DTYPES))}"
        )
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        found = f"shape {shape!r:.80} and data_offsets {offsets!r:.80}"
        raise ValueError(
            f"{path} is corrupt: {key!r} has {found}, expected integers from 0 up, and two offsets"
        )
    dtype = dtypes[entry["dtype"]]
    expected = math.prod(shape) * dtype.itemsize
    if offsets[1] - offsets[0] != expected:
        found = f"{offsets[1] - offsets[0]} bytes"
        raise ValueError(
            f"{path} is corrupt: {key!r} has {found}, its shape {shape} of {dtype} takes {expected}"
        )
    return dtype, tuple(shape), begin + offsets[0]


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    )


def _check_spans(tensors: Mapping[str, _Place], path: Path, begin: int, size: int) -> None:
    """Raises ValueError unless the tensors fill the file from the header's end, without overlaps
    and gaps.
    """
    end = begin
    nbytes = {key: math.prod(shape) * dtype.itemsize for key, (dtype, shape, _) in tensors.items()}
    for start, count, name in sorted((tensors[key][2], nbytes[key], key) for key in tensors):
        if start != end:
            raise ValueError(
                f"{path} is corrupt: {name!r} starts at byte {start}, expected {end}: without "
                "overlaps and gaps"
            )
        end = start + count
    if end != size:
        raise ValueError(f"{path} is cut off or corrupt: {size} bytes, its header describes {end}")
