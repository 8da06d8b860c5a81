"""torch's own files, the zip that `torch.save` writes: looked into without torch.load, and written
as a stream.

archive/data.pkl         a pickle; where a tensor is, it says of which storage, where and how shaped
archive/data/0, 1, ...   the storages, uncompressed

`torch.load(weights_only=True)` holds the whole file. With `mmap=True` (torch 2.13) it reads past
the end of a storage that is shorter than the pickle says, and takes compressed bytes for values,
both in silence; every page that was read counts as this process's memory. It wants a path, and
torch.distributed.checkpoint has many of these files in one. And it refuses all of a file in which
it finds a name of somebody's class, as each of DeepSpeed's has.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from io import FileIO, RawIOBase
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint import file_operations
from ..checkpoint.lazy import Lazy, as_lazy, bytes_of
from ..checkpoint.safetensors_files import DTYPES, fill, read_bytes
from ..comm.plain_values import dtype_named
from . import pickled
from .pickled import Global, Made, Persistent

__all__: list[str] = []

_ALIGNMENT = 64  # of a storage in the file, so that it can be mapped
_HEADER = 30  # bytes of a zip's local header before the name
# by the names that files have for storages: `Float`, `BFloat16`
_STORAGES = MappingProxyType(
    {
        torch.empty(0, dtype=each, device="cpu").type()[len("torch.") : -len("Tensor")]: each
        for each in (*dict(DTYPES).values(), torch.complex128)
    }
)
_PLAIN: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"builtins.dict": dict, "builtins.set": set, "torch.Size": tuple}
    | {"collections.Counter": Counter, "collections.OrderedDict": dict}
)
_PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


class _Storage(NamedTuple):
    record: str
    dtype: torch.dtype


class _Window(RawIOBase):
    """A range of a file, as a file; it grows by what is written into it."""

    def __init__(self, file: FileIO, offset: int, length: int = 0) -> None:
        self._file, self._offset, self.length, self._at = file, offset, length, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.length)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")[: max(0, self.length - self._at)]
        count = read_bytes(self._file, self._offset + self._at, view)
        self._at += count
        return count

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        file_operations.write_at(self._file, self._offset + self._at, view)
        self._at += len(view)
        self.length = max(self.length, self._at)
        return len(view)


class TorchFile:
    """What a file of `torch.save` holds, in `value`: plain values, a `Lazy` for each tensor, a
    `Made` for what nobody here knows.

    The file may be a part of an open one. Tensors that share memory are one `Lazy`, if they are the
    same in it. Raises ValueError if it is no such file, or says what can't be.
    """

    def __init__(self, file: FileIO, what: str, offset: int = 0, length: int | None = None) -> None:
        self._file = file
        self._what = what
        self._offset = offset
        length = os.fstat(file.fileno()).st_size - offset if length is None else length
        try:
            with zipfile.ZipFile(_Window(file, offset, length)) as archive:
                self._records = {
                    info.filename.partition("/")[2]: info for info in archive.infolist()
                }
                order = b"little"
                if (info := self._records.get("byteorder")) is not None:
                    order = archive.read(info)
                text = archive.read(self._records["data.pkl"])
        except OSError:
            raise
        except Exception as error:
            raise ValueError(
                f"{what} is no file of torch's, or is cut off: {type(error).__name__}: {error}; "
                "expected what torch.save writes since torch 1.6"
            ) from None
        if order != b"little":
            raise ValueError(
                f"{what} is {order.decode(errors='replace')}-endian, this machine is not"
            )
        self._positions: dict[str, int] = {}
        self._tensors: dict[tuple[Any, ...], Lazy] = {}
        self._in_memory: tuple[Lazy, Tensor] | None = None  # the last that `_in_order` has read
        self.value = pickled.read(text, what, self._make, self._storage)

    def _storage(self, identifier: Any) -> _Storage:
        kind, storage, key, *_ = identifier
        if kind != "storage" or not isinstance(storage, Global) or not isinstance(key, str):
            raise ValueError(f"the persistent id {identifier!r:.80}")
        name = storage.name.rpartition(".")[2].removesuffix("Storage")
        return _Storage(f"data/{key}", torch.uint8 if name == "Untyped" else _STORAGES[name])

    def _make(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """The few names that are understood."""
        if name.startswith("torch._utils._rebuild_parameter"):  # also one `_with_state`
            return arguments[0]
        if name.startswith("torch._utils._rebuild_tensor"):
            storage, offset, shape, strides, *more = arguments
            # of a view such as `tensor.conj()`, whose storage holds other numbers
            if more and isinstance(more[-1], dict) and {"conj", "neg"} & {*more[-1]}:
                raise ValueError(
                    f"a tensor {shape} whose storage holds the conjugate or the negative of it: "
                    "save tensor.resolve_conj().resolve_neg()"
                )
            dtype = dtype_of(more[2]) if name.endswith("_v3") else storage.dtype
            place = storage.record, dtype, offset, tuple(shape), tuple(strides)
            if place not in self._tensors:
                self._tensors[place] = self._tensor(*place)
            return self._tensors[place]
        # one that has attributes
        if name == "torch._tensor._rebuild_from_type_v2" and arguments[1].name in _PLAIN_TYPES:
            return self._make(arguments[0].name, arguments[2])
        return plain(name, arguments)

    def _tensor(
        self,
        record: str,
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> Lazy:
        # torch refuses what can't be a shape, and tells in which order elements lie
        likeness = torch.empty_strided(shape, strides, device="meta")
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        span, info = last + 1 if likeness.numel() else 0, self._records.get(record)
        end = (offset + span) * dtype.itemsize
        begins_in_it = isinstance(offset, int) and min(0, offset, *strides) == 0
        if info is None or not begins_in_it or end > info.file_size:
            raise ValueError(f"a tensor of shape {shape} lies beyond {record}, or that is missing")
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{record} is compressed")
        whole = Lazy(dtype, shape, partial(self._read, record, offset))
        return whole if likeness.is_contiguous() else self._in_order(whole, span, strides)

    def _in_order(self, stored: Lazy, span: int, strides: tuple[int, ...]) -> Lazy:
        """A tensor that does not lie in the order of its elements (transposed, expanded): it is
        read as a whole, and stays in memory until its last element, or another one, is read.
        """

        def read(start: int, into: Tensor) -> None:
            if self._in_memory is None or self._in_memory[0] is not stored:
                self._in_memory = None  # before there is another
                memory = torch.empty(span, dtype=stored.dtype)
                stored.read(0, memory)
                self._in_memory = stored, memory.as_strided(stored.shape, strides).reshape(-1)
            into.copy_(self._in_memory[1][start : start + into.numel()])
            if start + into.numel() == stored.numel:
                self._in_memory = None

        return Lazy(stored.dtype, stored.shape, read)

    def _read(self, record: str, offset: int, start: int, into: Tensor) -> None:
        if record not in self._positions:
            begin, header = self._offset + self._records[record].header_offset, bytearray(_HEADER)
            fill(self._file, begin, memoryview(header))
            self._positions[record] = begin + _HEADER + sum(struct.unpack("<HH", header[26:30]))
        begin = self._positions[record] + (offset + start) * into.itemsize
        if fill(self._file, begin, bytes_of(into)) < into.nbytes:
            raise ValueError(f"{self._what} ended within {record}: it is cut off")


def dtype_of(named: Global) -> torch.dtype:
    return dtype_named(named.name.removeprefix("torch."))


def plain(name: str, arguments: tuple[Any, ...]) -> Any:
    """What checkpoints of any system hold beside tensors."""
    if name in _PLAIN:
        return _PLAIN[name](*arguments)
    if name == "collections.defaultdict":
        return dict(*arguments[1:])
    # as old protocols write bytes
    if name == "_codecs.encode" and arguments[1:] == ("latin1",) and isinstance(arguments[0], str):
        return arguments[0].encode("latin1")
    return Made(name, arguments)


def write(file: FileIO, offset: int, value: Any, advance: Callable[[int], object]) -> int:
    """Writes plain values, `Lazy`s and tensors as `torch.load(weights_only=True)` reads them; what
    stands there twice, once. Returns bytes. Raises TypeError for what only its own class could
    pickle.
    """
    storages: dict[int, tuple[str, Lazy]] = {}

    def tensor(found: Any) -> Made | None:
        if isinstance(found, Counter):
            return Made("collections.Counter", (dict(found),))
        if not isinstance(found, Lazy | Tensor):
            return None
        lazy = as_lazy(found)
        key, _ = storages.setdefault(id(found), (str(len(storages)), lazy))
        kind, hooks = Global("torch.storage.UntypedStorage"), Made("collections.OrderedDict")
        storage = Persistent(("storage", kind, key, "cpu", lazy.nbytes))
        strides = torch.empty(lazy.shape, device="meta").stride()
        arguments = storage, 0, lazy.shape, strides, False, hooks, Global(str(lazy.dtype))
        return Made("torch._utils._rebuild_tensor_v3", arguments)

    text = pickled.write(value, tensor)
    window = _Window(file, offset)
    with zipfile.ZipFile(window, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        archive.writestr("archive/data.pkl", text)
        archive.writestr("archive/byteorder", "little")
        for key, lazy in storages.values():
            _write_storage(archive, window, f"archive/data/{key}", lazy, advance)
        archive.writestr("archive/version", "3\n")
    return window.length


def _write_storage(
    archive: zipfile.ZipFile,
    window: _Window,
    name: str,
    lazy: Lazy,
    advance: Callable[[int], object],
) -> None:
    info = zipfile.ZipInfo(name)
    large = lazy.nbytes >= zipfile.ZIP64_LIMIT
    begin = window.length + _HEADER + len(name) + 4 + 20 * large
    padding = -begin % _ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding  # as torch pads
    with archive.open(info, "w", force_zip64=large) as record:
        for piece in lazy.pieces():
            record.write(piece)
            advance(len(piece))
