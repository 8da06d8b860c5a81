"""torch's own files, the zip that `torch.save` writes: looked into without torch.load, and written
as a stream.

archive/data.pkl         a pickle; where a tensor is, it says of which storage, where and how shaped
archive/data/0, 1, ...   the storages, uncompressed

`torch.load(weights_only=True)` holds the whole file. With `mmap=True` (torch 2.13) it reads past
the end of a storage that is shorter than the pickle says, and takes compressed bytes for values,
both in silence; every page that was read counts as this process's memory. And it refuses
DeepSpeed's files, for their names of classes.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections import Counter
from collections.abc import Callable
from io import FileIO, RawIOBase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint import file_operations
from ..checkpoint.safetensors_files import bytes_of, read_bytes
from ..comm.plain_values import dtype_named
from . import pickled
from .lazy import Lazy, as_lazy
from .pickled import Global, Made, Persistent

__all__: list[str] = []

_ALIGNMENT = 64  # of a storage in the file, so that it can be mapped
_HEADER = 30  # bytes of a zip's local header before the name
_OLD_STORAGES = (
    "Double:float64 Float:float32 Half:float16 BFloat16:bfloat16 Long:int64 Int:int32 "
    "Short:int16 Char:int8 Byte:uint8 Bool:bool ComplexFloat:complex64 ComplexDouble:complex128"
)
_PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")


class _Storage(NamedTuple):
    record: str
    dtype: torch.dtype


class _Window(RawIOBase):
    """A range of a file, as a file; it grows by what is written into it."""

    def __init__(self, file: FileIO, offset: int, length: int = 0) -> None:
        self._file, self._offset, self.length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        )
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
    same in it.

    Raises:
        ValueError: it is no such file, or says what can't be.
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
                order = (
                    archive.read(self._records["byteorder"])
                    if "byteorder" in self._records
                    else b"little"
                )
                text = archive.read(self._records["data.pkl"])
        except (
            zipfile.BadZipFile,
            zipfile.LargeZipFile,
            KeyError,
            EOFError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            remedy = "expected what torch.save writes since torch 1.6"
            raise ValueError(
                f"{what} is no file of torch's, or is cut off: {type(error).__name__}: {error}; "
                f"{remedy}"
            ) from None
        if order != b"little":
            raise ValueError(
                f"{what} is {order.decode(errors='replace')}-endian, this machine is not"
            )
        self._positions: dict[str, int] = {}
        self._tensors: dict[tuple[Any, ...], Lazy] = {}
        self._in_memory: list[tuple[Lazy, Tensor]] = []  # the last of those that `_in_order` reads
        self.value = pickled.read(text, what, self._make, self._storage)

    def _storage(self, identifier: Any) -> _Storage:
        kind, storage, key, *_ = identifier
        if kind != "storage" or not isinstance(storage, Global) or not isinstance(key, str):
            raise ValueError(f"the persistent id {identifier!r:.80}")
        name = storage.name.rpartition(".")[2].removesuffix("Storage")
        old = dict(pair.split(":") for pair in _OLD_STORAGES.split())
        return _Storage(f"data/{key}", torch.uint8 if name == "Untyped" else dtype_named(old[name]))

    def _make(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """The few names that are understood."""
        if name in (
            "torch._utils._rebuild_tensor_v2",
            "torch._utils._rebuild_tensor_v3",
            "torch._utils._rebuild_tensor",
        ):
            storage, offset, shape, strides, *more = arguments
            dtype = (
                dtype_named(more[2].name.removeprefix("torch."))
                if name.endswith("v3")
                else storage.dtype
            )
            return self._tensor(storage.record, dtype, offset, tuple(shape), tuple(strides))
        if name in (
            "torch._utils._rebuild_parameter",
            "torch._utils._rebuild_parameter_with_state",
        ):
            return arguments[0]
        # one that has attributes
        if name == "torch._tensor._rebuild_from_type_v2" and arguments[1].name in _PLAIN_TYPES:
            return self._make(arguments[0].name, arguments[2])
        if name == "torch.Size":
            return tuple(*arguments)
        return plain(name, arguments)

    def _tensor(
        self,
        record: str,
        dtype: torch.dtype,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> Lazy:
        place = record, dtype, offset, shape, strides
        if place not in self._tensors:
            if not all(
                type(number) is int and number >= 0 for number in (offset, *shape, *strides)
            ) or len(shape) != len(strides):
                raise ValueError(
                    f"a tensor of shape {shape!r:.80} and strides {strides!r:.80} from element "
                    f"{offset!r:.20} on"
                )
            span = (
                sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
                if 0 not in shape
                else 0
            )
            if (info := self._records.get(record)) is None or (
                offset + span
            ) * dtype.itemsize > info.file_size:
                raise ValueError(
                    f"a tensor of shape {shape} lies beyond {record}, or that is missing"
                )
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{record} is compressed")
            whole = Lazy(
                dtype,
                shape,
                lambda start, into: self._read(record, (offset + start) * dtype.itemsize, into),
            )
            dense = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
            in_order = all(
                size == 1 or own == expected
                for size, own, expected in zip(shape, strides, dense, strict=True)
            )
            self._tensors[place] = (
                whole if in_order or not span else self._in_order(whole, span, strides)
            )
        return self._tensors[place]

    def _in_order(self, stored: Lazy, span: int, strides: tuple[int, ...]) -> Lazy:
        """A tensor that does not lie in the order of its elements (transposed, expanded): it is
        read as a whole, and stays in memory until its last element, or another one, is read.
        """

        def read(start: int, into: Tensor) -> None:
            if not self._in_memory or self._in_memory[0][0] is not stored:
                self._in_memory.clear()
                memory = torch.empty(span, dtype=stored.dtype)
                stored.read(0, memory)
                flat = memory.as_strided(stored.shape, strides).reshape(-1)
                self._in_memory.append((stored, flat))
            into.copy_(self._in_memory[0][1][start : start + into.numel()])
            if start + into.numel() == stored.numel:
                self._in_memory.clear()

        return Lazy(stored.dtype, stored.shape, read)

    def _read(self, record: str, start: int, into: Tensor) -> None:
        if record not in self._positions:
            header = bytearray(_HEADER)
            begin = self._offset + self._records[record].header_offset
            read_bytes(self._file, begin, memoryview(header))
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(
                header[28:30], "little"
            )
            self._positions[record] = begin + _HEADER + lengths
        view, offset = bytes_of(into), self._positions[record] + start
        while view:
            if not (count := read_bytes(self._file, offset, view)):
                raise ValueError(f"{self._what} ended within {record}: it is cut off")
            view, offset = view[count:], offset + count


def plain(name: str, arguments: tuple[Any, ...]) -> Any:
    """What checkpoints of any system hold beside tensors."""
    if name == "collections.OrderedDict" or name == "builtins.dict":
        return dict(*arguments)
    if name == "collections.defaultdict":
        return dict(*arguments[1:])
    if name == "collections.Counter":
        return Counter(*arguments)
    if name == "builtins.set":
        return set(*arguments)
    # as old protocols write bytes
    if name == "_codecs.encode" and arguments[1:] == ("latin1",) and isinstance(arguments[0], str):
        return arguments[0].encode("latin1")
    return Made(name, arguments)


def write(file: FileIO, offset: int, value: Any, advance: Callable[[int], object]) -> int:
    """Writes plain values, `Lazy`s and tensors as `torch.load(weights_only=True)` reads them; what
    stands there twice, once. Returns bytes.

    Raises:
        TypeError: a value that only its own class could pickle.
        OSError: what the file system says.
    """
    storages: dict[int, tuple[str, Lazy]] = {}

    def tensor(found: Any) -> Made | None:
        if isinstance(found, Counter):
            return Made("collections.Counter", (dict(found),))
        if not isinstance(found, Lazy | Tensor):
            return None
        lazy = as_lazy(found)
        key, _ = storages.setdefault(id(found), (str(len(storages)), lazy))
        strides = tuple(math.prod(lazy.shape[at + 1 :]) for at in range(len(lazy.shape)))
        storage = Persistent(
            ("storage", Global("torch.storage.UntypedStorage"), key, "cpu", lazy.nbytes)
        )
        hooks = Made("collections.OrderedDict")
        return Made(
            "torch._utils._rebuild_tensor_v3",
            (storage, 0, lazy.shape, strides, False, hooks, Global(str(lazy.dtype))),
        )

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
