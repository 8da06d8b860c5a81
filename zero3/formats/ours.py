"""zero3's own checkpoints, read without a model, and written as by one rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint import file_operations, manifest
from ..checkpoint.lazy import Lazy, as_lazy
from ..checkpoint.numbered import next_number
from ..checkpoint.ranges import Ranges
from ..checkpoint.safetensors_files import SafetensorsFiles
from ..checkpoint.safetensors_writing import as_file, write_hashed
from ..checkpoint.saved_optimizer import OptimizerContents, options_of, sorted_out
from ..comm.plain_values import decode, decode_scalars, encode, name_of
from .run import Holds, Run
from .values import small

__all__: list[str] = []

HOLDS = Holds(nested=False, config=True)


def is_one(path: Path) -> bool:
    return (path / manifest.NAME).is_file()


def read(path: Path, opened: ExitStack, advance: Callable[[int], object]) -> Run:
    """First the hashes are compared, as a load does."""
    found = manifest.read(path)
    manifest.verify(found, found.files, advance=advance)
    files = SafetensorsFiles(found.data, list(found.files))
    opened.callback(files.close)
    with manifest.reading(found):
        return _Checkpoint(found, files).run()


class _Checkpoint:
    def __init__(self, found: manifest.Manifest, files: SafetensorsFiles) -> None:
        self._found, self._content = found, found.content
        self._ranges, self._stored = Ranges(files), files.tensors

    def run(self) -> Run:
        content = self._content
        self._found.check_values()
        extra_states = content["extra_states"].items()
        run = Run(
            "zero3",
            {},
            extra_states={name: self._decoded(value) for name, value in extra_states},
            extra=self._decoded(content["extra"]),
            config=content["config"],
            ranks=content["world_size"],
        )
        for name, described in content["tensors"].items():
            if (buffer := self._stored.get(f"other:0:{name}")) is not None:
                run.tensors[name] = buffer
                run.buffers.add(name)
            else:
                shape, dtype = described["shape"], described["dtype"]
                run.tensors[name] = self._ranges.tensor("parameter", name, shape, dtype)
            if "also" in described:
                run.also[name] = described["also"]
        if any(name.startswith("random:") for name in self._stored):
            run.left_out.append("random generators")
        others = [name for name in self._stored if name.startswith("other:")]
        if any(not name.startswith("other:0:") for name in others):
            run.left_out.append("buffers in which other ranks differ from rank 0")
        if content["optimizer"] is None:
            return run
        return self._with_optimizer(run, OptimizerContents.from_json(content["optimizer"]))

    def _decoded(self, value: Any) -> Any:
        return decode(value, lambda number: self._stored[f"extra:{number}"])

    def _with_optimizer(self, run: Run, contents: OptimizerContents) -> Run:
        groups = [
            {**decode_scalars(options, "cpu"), "params": names}
            for options, names in contents.groups
        ]
        for name, named in contents.state.items():
            values = run.state[name] = decode_scalars(named.scalars, "cpu")
            for key, (dtype, shape) in named.tensors(run.tensors[name].shape).items():
                values[key] = small(self._ranges.tensor(f"state:{key}", name, shape, dtype))
        return replace(run, classes=contents.kinds, groups=groups)


def write(run: Run, path: Path, advance: Callable[[int], object]) -> None:
    """As a save by one rank writes it; any number of ranks can load that."""
    token = os.urandom(8).hex()
    content: dict[str, Any] = {"world_size": 1, "optimizer": None, "config": run.config}
    content["tensors"] = {name: _described(run, name) for name in run.tensors}
    model: dict[str, Lazy] = {}
    for name, lazy in run.tensors.items():
        whole = {f"other:0:{name}": lazy}
        model |= whole if name in run.buffers else _part("parameter", name, lazy)
    lazies: list[Lazy] = []  # in what stands beside
    content["extra"] = _encoded(run.extra, "extra", lazies)
    content["extra_states"] = {
        name: _encoded(value, name, lazies) for name, value in run.extra_states.items()
    }
    files = {"model": model | {f"extra:{number}": lazy for number, lazy in enumerate(lazies)}}
    if run.groups is not None:
        content["optimizer"], files["optimizer"] = _optimizer(run)
    data = path / f"data-{token}"
    file_operations.make_directory(data)
    written = {}
    for kind, tensors in files.items():
        name = f"{kind}-00000-of-00001.safetensors"
        with file_operations.writing(data / name) as file:
            written[name] = write_hashed(file, as_file(tensors, {}, advance, ours=True))
    for directory in (data, path):
        file_operations.sync_directory(directory)
    manifest.write(path, content | {"number": next_number(path)}, written, token)


def _part(kind: str, name: str, lazy: Lazy) -> dict[str, Lazy]:
    """All of a tensor, flattened, if it has elements."""
    flat = replace(lazy, shape=(lazy.numel,))
    return {f"{kind}:{name}[0:{lazy.numel}]": flat} if lazy.numel else {}


def _described(run: Run, name: str) -> dict[str, Any]:
    lazy = run.tensors[name]
    described = {"shape": list(lazy.shape), "dtype": name_of(lazy.dtype), "stored": True}
    return described | ({"also": run.also[name]} if name in run.also else {})


def _encoded(value: Any, what: str, lazies: list[Lazy]) -> Any:
    """As JSON has it. Tensors are appended to `lazies`, and their numbers stand for them."""

    def put(tensor: Lazy | Tensor) -> int:
        lazies.append(as_lazy(tensor))
        return len(lazies) - 1

    return encode(value, what, put, Lazy | Tensor)


def _optimizer(run: Run) -> tuple[dict[str, Any], dict[str, Lazy]]:
    groups = [
        (options_of(group, f"param_groups[{number}]"), group["params"])
        for number, group in enumerate(run.groups or ())
    ]
    state = sorted_out(run.state, run.shapes, Tensor | Lazy)
    tensors: dict[str, Lazy] = {}
    for name, named in state.items():
        for key in named.elements:
            tensors |= _part(f"state:{key}", name, as_lazy(run.state[name][key]))
        for key in named.whole:
            tensors[f"whole:{key}:{name}"] = as_lazy(run.state[name][key])
    kinds = " and ".join(dict.fromkeys(run.classes))
    contents = OptimizerContents(groups, state, run.classes)
    return {"class": kinds or None, **contents.to_json()}, tensors
