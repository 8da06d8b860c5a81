"""Collects what this rank writes into a checkpoint, and what the manifest says. Tensors are referred to, and not copied."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..comm.agreement import agreeing
from ..optim.several import Together
from . import file_operations, manifest, random_state
from .contents import Contents
from .extra_state import encoded, extra_states_of
from .numbered import check_run, next_number, prune
from .optimizer_contents import Held, contents_of
from .safetensors_files import bytes_of
from .safetensors_writing import Entry, Written, header_of
from .value_hashes import value_hashes

__all__: list[str] = []

_log = logging.getLogger("zero3")
_SCHEME = "fsspec paths are not supported, because their stores have no atomic rename: save to a directory, and copy it from there"


class Prepared:
    """One save: the tensors that this rank writes, their files, and the manifest's content."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        extra: Any,
        stored: tuple[bool, bool],
        stays: tuple[int | None, str | None],
    ) -> None:
        """`stored`: the arguments `weights` and `frozen` of `save_checkpoint`; `stays`: `keep_last` and `run`."""
        keep_last, run = stays
        if "://" in os.fspath(path):
            raise ValueError(f"{os.fspath(path)}: {_SCHEME}")
        if keep_last is not None and (not isinstance(keep_last, int) or isinstance(keep_last, bool)):
            raise TypeError(f"keep_last must be an integer of at least 1, or None, found {keep_last!r}")
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, found {keep_last}")
        check_run(run)
        self.run = run or ""
        self.directory = Path(os.path.abspath(path))
        self.keep_last = keep_last
        self.contents = Contents(model, "save_checkpoint")
        self.weights, self.frozen = stored
        self.token = ""
        self.model_entries: list[Entry] = []
        self.optimizer_entries: list[Entry] | None = None
        self.metadata: dict[str, str] = {}
        self.content: dict[str, Any] = {"world_size": self.contents.world_size, "optimizer": None}
        written = getattr(getattr(model, "config", None), "to_json_string", None)
        self.content["config"] = json.loads(written()) if callable(written) else None
        tensors: list[Tensor] = []
        first = self.contents.is_first
        self.content["extra"] = encoded({"extra": extra}, tensors)["extra"] if first else None
        self.content["extra_states"] = encoded(extra_states_of(model), tensors) if first else None
        self.model_entries += [Entry(f"extra:{number}", tensor, tuple(tensor.shape)) for number, tensor in enumerate(tensors)]
        self.content["tensors"] = {
            name: {**described, "stored": self.stores(name)} for name, described in self.contents.description().items()
        }
        self.contents.check_loaded(filter(self.stores, [*self.contents.parameters, *self.contents.others]), "save_checkpoint")
        # both raise if the format has no name for a dtype
        header_of(((entry.name, entry.tensor.dtype, entry.shape) for entry in self.model_entries), {}, ours=True)
        header_of(((name, self.contents.dtype(name), ()) for name in self.content["tensors"]), {}, ours=True)

    def stores(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor's values."""
        return name in self.contents.others or (self.weights and (self.frozen or self.contents.trains(name)))

    def lines(self) -> list[str]:
        """Returns what has to be the same on all ranks."""
        tensors = (f"{name}: {described}" for name, described in self.content["tensors"].items())
        return [f"path: {self.directory}", f"keep_last: {self.keep_last}", f"run: {self.run}", *tensors]

    def gather_entries(self, optimizer: Together | None, held: list[Held]) -> None:
        """Collects the tensors that this rank writes. Every rank calls it."""
        contents, rank = self.contents, self.contents.rank
        others = sha256()
        for tensor in contents.others.values():
            others.update(bytes_of(tensor.detach().cpu().contiguous()))
        answers = contents.communicator.exchange(os.urandom(8) + others.digest(), contents.device)
        self.token = answers[0][:8].hex()
        launched = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's, which restarts keep
        self.run = self.run or contents.states[0].run or (launched if launched not in ("", "none") else self.token)
        for state in contents.states:
            state.run = self.run
        self.content["run"] = self.run
        if rank == 0 or answers[rank][8:] != answers[0][8:]:  # ranks whose buffers equal rank 0's do not store them again
            for name, tensor in contents.others.items():
                self.model_entries.append(Entry(f"other:{rank}:{name}", tensor.detach(), tuple(tensor.shape)))
        for chunk in contents.chunks():
            chunk.adopt_values()
            for name, start, stop, offset in contents.spans(chunk) if contents.writes else ():
                if self.stores(name) and start < stop:
                    self.model_entries.append(_entry(f"parameter:{name}", chunk.shard.data, start, stop, offset))
        generators, self.metadata["random"] = random_state.generators(contents.device)
        self.model_entries += [Entry(f"random:{rank}:{kind}", state, tuple(state.shape)) for kind, state in generators.items()]
        left = [name for name in contents.parameters if self.weights and not self.stores(name) and not contents.is_empty(name)]
        for name, value in value_hashes(contents, left, "save_checkpoint").items():
            self.content["tensors"][name]["hash"] = value
        if optimizer is not None:
            merged = contents_of(optimizer, held, contents)
            self.content["optimizer"] = {"class": optimizer.name, **merged.to_json()}
            self.optimizer_entries = _state_entries(optimizer, held) if contents.writes else None

    def make_directory(self) -> None:
        """Rank 0 makes the directory. Every rank calls it."""
        try:
            with agreeing(self.contents.communicator, self.contents.device, "the directory of save_checkpoint"):
                if self.contents.is_first:
                    manifest.begin(self.directory, self.run, self.token)
        except Exception:
            self.clean()
            raise

    def files(self) -> dict[str, tuple[list[Entry], Mapping[str, str]]]:
        """Returns the tensors and the metadata of each file that this rank writes."""
        suffix = f"{self.contents.rank:05}-of-{self.contents.world_size:05}.safetensors"
        files: dict[str, tuple[list[Entry], Mapping[str, str]]] = {f"model-{suffix}": (self.model_entries, self.metadata)}
        if self.optimizer_entries is not None:
            files[f"optimizer-{suffix}"] = self.optimizer_entries, {}
        return files

    def commit(self, files: dict[str, Written]) -> None:
        """Writes the manifest. Rank 0 calls it when the files of all ranks are on the disk."""
        for directory in (self.directory / f"data-{self.token}", self.directory, self.directory.parent):
            file_operations.sync_directory(directory)
        self.content["number"] = next_number(self.directory)
        manifest.write(self.directory, self.content, dict(sorted(files.items())), self.token)

    def clean(self) -> None:
        """Removes the files of the replaced checkpoint and of failed saves. Only rank 0 does. If it fails, the next save tries again."""
        if not self.contents.is_first:
            return
        try:
            there = (self.directory / manifest.NAME).is_file()
            manifest.clean(self.directory, manifest.read(self.directory).data.name if there else None)
            if self.directory.is_dir() and not file_operations.names_in(self.directory):
                file_operations.remove(self.directory)
            if self.keep_last is not None:
                prune(self.directory.parent, self.keep_last, self.run)
        except (OSError, ValueError) as error:
            _log.warning("cleaning up after a checkpoint failed: %s", error)


def _entry(name: str, flat: Tensor, start: int, stop: int, offset: int) -> Entry:
    return Entry(f"{name}[{start}:{stop}]", flat[offset : offset + stop - start], (stop - start,))


def _state_entries(optimizer: Together, held: list[Held]) -> list[Entry]:
    entries = []
    for one in held:
        for key, value in optimizer.state.get(one.parameter, {}).items():
            if not isinstance(value, Tensor) or not one.spans or not one.mine:
                continue
            if value.shape != one.parameter.shape:
                if value.dim():
                    entries.append(Entry(f"whole:{key}:{one.filled[0].name}", value.detach(), tuple(value.shape)))
                continue
            flat = value.detach().reshape(-1)
            entries += [_entry(f"state:{key}:{name}", flat, *range_) for name, *range_ in one.spans if range_[0] < range_[1]]
    return entries
