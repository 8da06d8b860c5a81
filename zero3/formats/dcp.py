"""torch.distributed.checkpoint's directories, as FSDP2 users save them.

.metadata        a pickle: names, shapes, the blocks that ranks had, and where each lies
__0_0.distcp     what a rank wrote: a small file of torch's for each block or value, one after
                 another

torch's own reader unpickles `.metadata` without restriction. Its writer keeps all tensors of a file
in memory until the file is complete, and its planner drops empty dicts and makes text of numbers
that are keys. To import them takes longer than zero3.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint import file_operations
from ..comm.plain_values import dtype_named
from . import pickled, torch_files
from .lazy import Block, Lazy, as_lazy, assembled
from .pickled import Global, Made
from .run import Holds, Run
from .trees import run_of, tree_of

__all__: list[str] = []

HOLDS = Holds()

_METADATA = ".metadata"
_FILE = "__0_0.distcp"
_MODULE = "torch.distributed.checkpoint.metadata"
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
    tree = (
        _unfolded({tuple(paths.get(key, (key,))): value for key, value in leaves.items()})
        if paths
        else _split(leaves)
    )
    return run_of(tree, "dcp", str(path))


def _state(made: Any) -> dict[str, Any]:
    if not isinstance(made, Made) or not isinstance(made.state, dict):
        raise ValueError(
            f"the metadata of torch.distributed.checkpoint has {made!r:.80} where an object belongs"
        )
    return made.state


class _Reader:
    def __init__(self, directory: Path, files: ExitStack, found: dict[str, Any]) -> None:
        self._directory = directory
        self._opened = files
        self._files: dict[str, FileIO] = {}
        self._where: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}
        for index, where in found["storage_data"].items():
            named = _state(index)
            offset = named.get("offset")
            self._where[named["fqn"], tuple(offset) if offset is not None else None] = _state(where)

    def value(self, key: str, described: Made) -> Any:
        """A `Lazy`, or what was pickled."""
        if described.name.endswith(".BytesStorageMetadata"):
            return self._item(key, None).value
        facts = _state(described)
        properties = facts["properties"].state
        dtype = properties["dtype"] if isinstance(properties, dict) else properties[0]
        blocks = []
        for chunk in map(_state, facts["chunks"]):
            blocks.append(
                Block(chunk["offsets"], self._block(key, chunk["offsets"], chunk["sizes"], dtype))
            )
        shape = tuple(facts["size"])
        if sum(block.values.numel for block in blocks) != math.prod(shape):
            raise ValueError(
                f"{self._directory}: {key} has {shape}, and its blocks are "
                f"{[block.values.shape for block in blocks]}"
            )
        return assembled(dtype_named(dtype.name.removeprefix("torch.")), shape, blocks)

    def _block(
        self, key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], dtype: Global
    ) -> Lazy:
        expected = dtype_named(dtype.name.removeprefix("torch."))

        opened: list[Lazy] = []  # when it is first read: there may be many

        def read(start: int, into: Tensor) -> None:
            if not opened:
                found = self._item(key, tuple(offsets)).value
                if (
                    not isinstance(found, Lazy)
                    or found.shape != tuple(sizes)
                    or found.dtype != expected
                ):
                    raise ValueError(
                        f"{self._directory}: {key} has {found!r:.80}, expected {tuple(sizes)} of "
                        f"{expected}"
                    )
                opened.append(found)
            opened[0].read(start, into)

        return Lazy(expected, tuple(sizes), read)

    def _item(self, key: str, offsets: tuple[int, ...] | None) -> torch_files.TorchFile:
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
        if name not in self._files:
            self._files[name] = self._opened.enter_context(
                FileIO(os.fspath(self._directory / name))
            )
        return torch_files.TorchFile(
            self._files[name],
            f"{key} in {self._directory / name}",
            where["offset"],
            where["length"],
        )


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
    paths = {
        key: tuple(key.split(".", 1))
        if key.startswith(("model.", "optimizer.", "optim."))
        else (key,)
        for key in leaves
    }
    whole = not any(
        isinstance(value, Lazy) and len(paths[key]) == 1 for key, value in leaves.items()
    )
    found: dict[str, Any] = _unfolded(
        {paths[key] if whole else (key,): value for key, value in leaves.items()}
    )
    return found


def write(run: Run, path: Path, advance: Callable[[int], object]) -> None:
    """One file, in which each tensor is one block: any number of ranks of torch's can load that."""
    leaves = dict(_leaves(tree_of(run), ()))
    described: dict[str, Any] = {}
    where: dict[Any, Any] = {}
    file_operations.make_directory(path)
    offset = 0
    with file_operations.create(path / _FILE) as file:
        for parts, value in leaves.items():
            key = ".".join(map(str, parts))
            if key in described:
                raise ValueError(
                    f"two values would have the name {key!r} in torch.distributed.checkpoint"
                )
            is_tensor = isinstance(value, Tensor | Lazy)
            lazy = as_lazy(value) if is_tensor else value
            described[key] = (
                _description(lazy)
                if is_tensor
                else Made(f"{_MODULE}.BytesStorageMetadata", state={}, new=True)
            )
            length = torch_files.write(file, offset, value, advance)
            index = {
                "fqn": key,
                "offset": _size([0] * len(lazy.shape)) if is_tensor else None,
                "index": 0 if is_tensor else None,
            }
            place = {"relative_path": _FILE, "offset": offset, "length": length}
            info = Made(
                "torch.distributed.checkpoint.filesystem._StorageInfo", state=place, new=True
            )
            where[Made(f"{_MODULE}.MetadataIndex", state=index, new=True)] = info
            offset += length
        file_operations.sync(file)
    state = {
        "state_dict_metadata": described,
        "planner_data": {".".join(map(str, parts)): parts for parts in leaves},
        "storage_data": where,
        "storage_meta": None,
        "version": "1.0.0",
    }
    metadata = Made(f"{_MODULE}.Metadata", state=state, new=True)
    with file_operations.create(path / _METADATA) as file:
        file_operations.write(file, [memoryview(pickled.write(metadata, lambda value: None))])
        file_operations.sync(file)
    file_operations.sync_directory(path)


def _size(numbers: Any) -> Made:
    return Made("torch.Size", (tuple(numbers),))


def _description(lazy: Lazy) -> Made:
    layout = Made("torch.serialization._get_layout", ("torch.strided",))
    memory_format = Made(f"{_MODULE}._MEM_FORMAT_ENCODING", (0,))
    properties = Made(
        f"{_MODULE}.TensorProperties",
        state=(Global(str(lazy.dtype)), layout, False, memory_format, False),
        new=True,
    )
    chunk = {"offsets": _size([0] * len(lazy.shape)), "sizes": _size(lazy.shape)}
    chunks = [Made(f"{_MODULE}.ChunkStorageMetadata", state=chunk, new=True)]
    facts = {"properties": properties, "size": _size(lazy.shape), "chunks": chunks}
    return Made(f"{_MODULE}.TensorStorageMetadata", state=facts, new=True)


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
