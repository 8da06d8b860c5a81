"""torch.distributed.checkpoint's directories, as FSDP2 users save them.

.metadata        a pickle: names, shapes, the blocks that ranks had, and where each lies
__0_0.distcp     what a rank wrote: a small file of torch's for each block or value, one after
                 another

torch's own reader unpickles `.metadata`, and values, without restriction. Its writer keeps all
tensors of a file in memory until the file is complete, and its planner drops empty dicts and makes
text of numbers that are keys. To import its classes takes longer than zero3, and tens of MB.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import file_operations
from ..checkpoint.lazy import Lazy, as_lazy, assembled, fills
from . import pickled, torch_files
from .pickled import Global, Made
from .run import Holds, Run
from .trees import run_of, tree_of

__all__: list[str] = []

HOLDS = Holds()

_METADATA = ".metadata"
_FILE = "__0_0.distcp"
_MODULE = "torch.distributed.checkpoint.metadata"
_PLACE = "torch.distributed.checkpoint.filesystem._StorageInfo"
_Path = tuple[str | int, ...]


def is_one(path: Path) -> bool:
    return (path / _METADATA).is_file()


def read(path: Path, files: ExitStack, _: Callable[[int], object]) -> Run:
    metadata = path / _METADATA
    found = _state(pickled.read(metadata.read_bytes(), str(metadata), torch_files.plain))
    reader = _Reader(path, files, found)
    leaves = {
        key: reader.value(key, described) for key, described in found["state_dict_metadata"].items()
    }
    paths = found.get("planner_data") or {}
    folded = {tuple(paths.get(key, (key,))): value for key, value in leaves.items()}
    return run_of(_unfolded(folded) if paths else _split(leaves), "dcp", str(path))


def _state(made: Any) -> dict[str, Any]:
    if not isinstance(made, Made) or not isinstance(made.state, dict):
        raise ValueError(
            f"the metadata of torch.distributed.checkpoint has {made!r:.80} where an object belongs"
        )
    return made.state


class _Reader:
    def __init__(self, directory: Path, files: ExitStack, found: dict[str, Any]) -> None:
        self._directory = directory
        self._files = files
        self._opened: dict[str, FileIO] = {}
        self._where = {}  # by name and offsets, which are None for what is no tensor
        for index, where in found["storage_data"].items():
            named = _state(index)
            self._where[named["fqn"], named.get("offset")] = _state(where)

    def value(self, key: str, described: Made) -> Any:
        """A `Lazy`, or what was pickled."""
        if described.name.endswith(".BytesStorageMetadata"):
            return self._item(key, None)
        facts = _state(described)
        properties, shape = facts["properties"].state, facts["size"]
        named = properties["dtype"] if isinstance(properties, dict) else properties[0]
        dtype = torch_files.dtype_of(named)
        blocks = [
            (chunk["offsets"], self._block(key, chunk["offsets"], chunk["sizes"], dtype))
            for chunk in map(_state, facts["chunks"])
        ]
        if not fills(shape, [(begin, values.shape) for begin, values in blocks]):
            raise ValueError(
                f"{self._directory}: {key} has {shape}, which its blocks don't fill, each element "
                f"once: {', '.join(f'{v.shape} from {begin} on' for begin, v in blocks)}"
            )
        return assembled(dtype, shape, blocks)

    def _block(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: torch.dtype
    ) -> Lazy:
        opened: list[Lazy] = []  # when it is first read: there may be many

        def read(start: int, into: Tensor) -> None:
            if not opened:
                found = self._item(key, offsets)
                if not isinstance(found, Lazy) or (found.shape, found.dtype) != (sizes, dtype):
                    raise ValueError(
                        f"{self._directory}: {key} has {found!r:.80}, expected {sizes} of {dtype}"
                    )
                opened.append(found)
            opened[0].read(start, into)

        return Lazy(dtype, sizes, read)

    def _item(self, key: str, offsets: tuple[int, ...] | None) -> Any:
        where = self._where.get((key, offsets)) or self._where.get((key, None))
        if where is None:
            raise ValueError(
                f"{self._directory / _METADATA} does not say where {key} from {offsets} on lies"
            )
        if where.get("transform_descriptors"):
            raise ValueError(
                f"{self._directory}: {key} is stored by way of {where['transform_descriptors']}, "
                "which can't be read"
            )
        name = where["relative_path"]
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise ValueError(
                f"{self._directory / _METADATA} names the file {name!r:.80}, expected one beside it"
            )
        path = self._directory / name
        if name not in self._opened:
            self._opened[name] = self._files.enter_context(FileIO(os.fspath(path)))
        file, what = self._opened[name], f"{key} in {path}"
        return torch_files.TorchFile(file, what, where["offset"], where["length"]).value


def _unfolded(leaves: dict[_Path, Any]) -> Any:
    """Dicts and lists from paths, in which numbers are places in lists."""
    if () in leaves:
        return leaves[()]
    inner: dict[str | int, dict[_Path, Any]] = {}
    for path, value in leaves.items():
        inner.setdefault(path[0], {})[path[1:]] = value
    if all(isinstance(key, int) for key in inner):
        return [_unfolded(inner[key]) for key in sorted(inner)]
    return {key: _unfolded(value) for key, value in inner.items()}


def _split(leaves: dict[str, Any]) -> dict[str, Any]:
    """Names without paths: what begins with `model.` or `optimizer.` belongs there, if anything
    does.
    """
    parts = ("model.", "optimizer.", "optim.")
    beside = {key for key in leaves if not key.startswith(parts)}
    if any(isinstance(leaves[key], Lazy) for key in beside):
        return leaves
    found: dict[str, Any] = _unfolded(
        {(key,) if key in beside else tuple(key.split(".", 1)): leaves[key] for key in leaves}
    )
    return found


def write(run: Run, path: Path, advance: Callable[[int], object]) -> None:
    """One file, in which each tensor is one block: any number of ranks of torch's can load that."""
    described: dict[str, Made] = {}
    where: dict[Made, Made] = {}
    paths: dict[str, _Path] = {}
    file_operations.make_directory(path)
    offset = 0
    with file_operations.writing(path / _FILE) as file:
        for parts, value in _leaves(tree_of(run), ()):
            key = ".".join(map(str, parts))
            if key in paths:
                raise ValueError(
                    f"two values would have the name {key!r} in torch.distributed.checkpoint"
                )
            lazy = as_lazy(value) if isinstance(value, Tensor | Lazy) else None
            begin = None if lazy is None else _size(0 for _ in lazy.shape)
            index = _made(
                "MetadataIndex", fqn=key, offset=begin, index=None if begin is None else 0
            )
            length = torch_files.write(file, offset, value, advance)
            place = {"relative_path": _FILE, "offset": offset, "length": length}
            where[index] = Made(_PLACE, state=place, new=True)
            described[key], paths[key] = _description(lazy, begin), parts
            offset += length
    metadata = _made(
        "Metadata",
        state_dict_metadata=described,
        planner_data=paths,
        storage_data=where,
        storage_meta=None,
        version="1.0.0",
    )
    with file_operations.writing(path / _METADATA) as file:
        file_operations.write(file, [memoryview(pickled.write(metadata, lambda value: None))])
    file_operations.sync_directory(path)


def _made(name: str, **state: Any) -> Made:
    return Made(f"{_MODULE}.{name}", state=state, new=True)


def _size(numbers: Iterable[int]) -> Made:
    return Made("torch.Size", (tuple(numbers),))


def _description(lazy: Lazy | None, begin: Made | None) -> Made:
    if lazy is None:
        return _made("BytesStorageMetadata")
    layout = Made("torch.serialization._get_layout", ("torch.strided",))
    memory_format = Made(f"{_MODULE}._MEM_FORMAT_ENCODING", (0,))
    facts = Global(str(lazy.dtype)), layout, False, memory_format, False
    properties = Made(f"{_MODULE}.TensorProperties", state=facts, new=True)
    size = _size(lazy.shape)
    chunk = _made("ChunkStorageMetadata", offsets=begin, sizes=size)
    return _made("TensorStorageMetadata", properties=properties, size=size, chunks=[chunk])


def _leaves(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """As torch takes state dicts apart: dicts (here: with strings for keys), and lists that hold
    tensors or such lists.
    """
    if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
        for key, held in value.items():
            yield from _leaves(held, (*path, key))
    elif _has_leaves(value):
        for number, item in enumerate(value):
            yield from _leaves(item, (*path, number))
    else:
        yield path, value


def _has_leaves(value: Any) -> bool:
    return isinstance(value, list) and any(
        isinstance(item, Tensor | Lazy | dict) or _has_leaves(item) for item in value
    )
