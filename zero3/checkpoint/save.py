"""save_checkpoint(): every rank writes its own part, and one rename makes the files a checkpoint.

First everything is collected, and all mistakes are found, before a file is made. Tensors are
referred to, or copied if they are written in the background. Then files are written, and a manifest
at the end.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..access import used_together
from ..comm.agreement import agree, agreeing, exchange_texts
from ..comm.plain_values import integer
from ..optim.check_optimizer import warn_if_inexact
from ..optim.several import Optimizers
from ..optim.state_memory import land_steps
from ..policy import directory_of
from ..scratch.mapped_files import MappedFiles
from . import file_operations, manifest, random_state
from .contents import Contents, NamedSpan
from .extra_state import encoded, extra_states_of
from .hosts import Hosts, from_rank
from .lazy import bytes_of, resolved
from .numbered import check_run, next_number, prune, saves_of
from .safetensors_writing import Written, as_file, header_of, write_hashed
from .saved_optimizer import Holding, contents_of
from .value_hashes import value_hashes

__all__: list[str] = []

_log = logging.getLogger("zero3")
_ALIGNMENT = 64  # bytes, so that copies of any dtype may begin there


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Any = None,
    weights: bool = True,
    frozen: bool = True,
    keep_last: int | None = None,
    run: str | None = None,
    background: bool = False,
    local: bool = False,
    replicas: int = 0,
) -> Saving:
    """Saves model, optimizer and `extra` in a directory. Every rank writes its own part.

    Nothing is gathered. A checkpoint holds parameters, buffers, modules' extra state (rank 0's
    `get_extra_state`), the optimizer's groups and state by parameter name, and every rank's random
    generators. On a mesh with replicas the first one writes what they share. A checkpoint appears
    by one rename, when all files are on the disk. If a rank fails before that (a crash, a full
    disk), the earlier checkpoint under `path` is still complete, and the next save cleans up. Files
    are hashed while they are written.

    Args:
        path: A directory of a file system that all ranks see. Parents are created. A checkpoint in
            it is replaced, and other files are left alone.
        model: Any model that contains zero3 layers.
        optimizer: One over `get_trainable_chunk(model)`, `param_groups(model, ...)` or
            `model.parameters()`. Pass several that share the model (Muon for matrices, AdamW for
            the rest) as a list or a dict; order and keys do not matter.
        extra: Any nesting of None, numbers, strings, lists, tuples, dicts and tensors. Rank 0's is
            saved.
        weights: False leaves out all parameters, if they are saved elsewhere (by `save_pretrained`,
            say). Pass it to `load_checkpoint` too.
        frozen: False leaves frozen parameters out, and keeps a hash of the values of each. (With
            LoRA adapters, `load_pretrained` can load them.) `load_checkpoint` refuses a model with
            other values.
        keep_last: How many checkpoints of this run stay in the parent directory of `path`, the
            newest ones. None: all stay. Those of other runs stay, and those that name no run.
        run: The name of the run that the checkpoint belongs to. None: that of the checkpoint that
            the model was loaded from or saved in last; for the first one torchrun's
            `TORCHELASTIC_RUN_ID` (unless it is "none"), or a new random name.
        background: Return when everything is copied to host memory, and write from a thread. The
            checkpoint appears when every rank has called `wait()`, some steps later. The next save
            or load of the model calls it too. (With `offload=DIR` the copy is a file without a name
            in that directory, and takes no memory.)
        local: `path` is on storage that only a host's own ranks see. Each host's directory gets its
            ranks' files and the manifest. Give each such save a name of its own, the same on all
            ranks: what lies under `path` is deleted first. `keep_last` works on every host.
            `load_checkpoint` brings together what hosts lack; for `latest_checkpoint` pass `model`.
        replicas: With `local`, each rank's files are sent to so many other hosts, too: then as many
            may be lost. (If there are fewer hosts, to all.) With `background`, in `wait()`.

    Returns:
        A `Saving`. Without `background` there is nothing to wait for.

    Raises:
        TypeError: `extra`, a module's extra state, or an option or a state of the optimizer holds a
            value that could only be pickled; `keep_last` or `replicas` is no integer, or `run` no
            text.
        ValueError: Nothing in `model` is sharded, an optimizer is of another model, two optimizers
            hold one parameter, ranks save different things or have made different steps,
            `keep_last` is less than 1, `replicas` is negative or given without `local`, `run` is
            empty, or with `background` the directory of
            `offload` is gone. Every rank raises it, before anything is written.
        RuntimeError: Parameters have no values, or the call is inside `full_params` or `resident`.
        OSError: A rank could not write, or has no room for the copies of `background`; or, with
            `offload=DIR`, its disk has lost what a step of the optimizer's has changed. Every rank
            raises the same error.

    Example::

        extra = {"step": step, "schedule": schedule.state_dict()}
        path = f"{directory}/step-{step}"
        zero3.save_checkpoint(path, model, optimizer, extra=extra, keep_last=3)
    """
    asked = _Asked(path, extra, weights, frozen, keep_last, run, background, local, replicas)
    saving = Saving(_prepare(asked, model, optimizer))
    if not background:
        saving.wait()
    return saving


@dataclass(frozen=True)
class _Asked:
    """The arguments of `save_checkpoint`."""

    path: str | os.PathLike[str]
    extra: Any
    weights: bool
    frozen: bool
    keep_last: int | None
    run: str | None
    background: bool
    local: bool
    replicas: int

    def check(self) -> None:
        file_operations.directory_of(self.path)
        path, keep_last = os.fspath(self.path), self.keep_last
        if "://" in path:
            raise ValueError(
                f"{path}: fsspec paths are not supported, because their stores have no atomic "
                "rename: save to a directory, and copy it from there"
            )
        if keep_last is not None and integer(keep_last) is None:
            expected = "keep_last must be an integer of at least 1, or None"
            raise TypeError(f"{expected}, found {keep_last!r}")
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, found {keep_last}")
        check_run(self.run)
        if integer(self.replicas) is None:
            raise TypeError(f"replicas must be an integer of at least 0, found {self.replicas!r}")
        if self.replicas < 0 or (self.replicas and not self.local):
            raise ValueError(
                f"replicas={self.replicas}: expected at least 0, and local=True: copies are for "
                "hosts that do not see each other's files"
            )


def _prepare(asked: _Asked, model: nn.Module, optimizer: Optimizers | None) -> _Prepared:
    """Finds all mistakes before a file is made. Every rank raises them."""
    first = used_together(model, "save_checkpoint")[0]
    # if ranks have made different transfers, a checkpoint of them must not replace a good one
    first.log.look()
    saves_of(first).finish()
    holding: Holding | None = None
    with agreeing(first, "save_checkpoint", log=first.log) as lines:
        prepared = _Prepared(asked, model)
        land_steps(prepared.contents.states)
        if optimizer is not None:
            holding = Holding(optimizer, prepared.contents)
            for member in holding.optimizer.members:
                warn_if_inexact(prepared.contents.states, member)
        optimizers = holding.optimizer.name if holding is not None else None
        lines += [*prepared.lines(), f"optimizer: {optimizers}", f"background: {asked.background}"]
        if first.policy.compare_every:  # a short run may not have come to that yet
            lines.append(first.log.summary())
    prepared.gather_entries(holding)
    prepared.make_directory()
    return prepared


class _Prepared:
    """One save: the tensors that this rank writes, their files, and the manifest's content."""

    def __init__(self, asked: _Asked, model: nn.Module) -> None:
        asked.check()
        self.asked = asked
        self.run = asked.run or ""
        self.directory = Path(os.path.abspath(asked.path))
        self.contents = contents = Contents(model, "save_checkpoint")
        self.token = ""
        self.hosts: Hosts | None = None  # with `local`, those on which the parts lie
        self.model_entries: dict[str, Tensor] = {}
        self.optimizer_entries: dict[str, Tensor] | None = None
        self.metadata: dict[str, str] = {}
        written = getattr(getattr(model, "config", None), "to_json_string", None)
        tensors: list[Tensor] = []
        self.content: dict[str, Any] = {
            **({"local": True} if asked.local else {}),
            "world_size": contents.world_size,
            "optimizer": None,
            "config": json.loads(written()) if callable(written) else None,
            "extra": None,
            "extra_states": None,
        }
        if contents.is_first:
            self.content["extra"] = encoded({"extra": asked.extra}, tensors)["extra"]
            self.content["extra_states"] = encoded(extra_states_of(model), tensors)
        self.model_entries |= {f"extra:{n}": tensor for n, tensor in enumerate(tensors)}
        found = contents.description().items()
        self.content["tensors"] = {n: {**each, "stored": self.stores(n)} for n, each in found}
        named = [*contents.parameters, *contents.others]
        contents.check_loaded(filter(self.stores, named), "save_checkpoint")
        # both raise if the format has no name for a dtype
        header_of(self.model_entries, {}, ours=True)
        dtypes = {name: contents.dtype(name) for name in self.content["tensors"]}
        header_of(
            {n: torch.empty(0, dtype=each, device="meta") for n, each in dtypes.items()},
            {},
            ours=True,
        )

    def stores(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor's values."""
        wanted = self.asked.weights and (self.asked.frozen or self.contents.trains(name))
        return wanted or name in self.contents.others

    def lines(self) -> list[str]:
        """Returns what has to be the same on all ranks."""
        tensors = (f"{name}: {described}" for name, described in self.content["tensors"].items())
        asked = self.asked
        where = f"name: {self.directory.name}" if asked.local else f"path: {self.directory}"
        tier = [f"local: {asked.local}", where, f"replicas: {asked.replicas}"]
        return [*tier, f"keep_last: {asked.keep_last}", f"run: {self.run}", *tensors]

    @property
    def leads(self) -> bool:
        """Whether this rank makes directories, writes the manifest, and cleans up."""
        return self.contents.is_first if self.hosts is None else self.hosts.leads

    def gather_entries(self, holding: Holding | None) -> None:
        """Collects the tensors that this rank writes. Every rank calls it."""
        contents, number = self.contents, self.contents.number
        others = sha256()
        for tensor in contents.others.values():
            others.update(bytes_of(resolved(tensor.detach().cpu().contiguous())))
        own = os.urandom(8) + others.digest()
        answers = contents.communicator.exchange(own, contents.device)
        self.token = answers[0][:8].hex()
        self._join_run()
        # ranks whose buffers equal rank 0's do not store them again
        if number == 0 or answers[number][8:] != answers[0][8:]:
            buffers = contents.others.items()
            self.model_entries |= {f"other:{number}:{name}": each for name, each in buffers}
        for chunk in contents.chunks():
            chunk.adopt_values()
            for span in contents.spans(chunk) if contents.writes else ():
                if self.stores(span.name) and span.numel:
                    self.model_entries |= _part("parameter", span, chunk.shard.data)
        generators, self.metadata["random"] = random_state.generators(contents.device)
        self.model_entries |= {f"random:{number}:{kind}": s for kind, s in generators.items()}
        left = [name for name in contents.parameters if not self.stores(name)]
        left = [name for name in left if self.asked.weights and not contents.is_empty(name)]
        for name, value in value_hashes(contents, left, "save_checkpoint").items():
            self.content["tensors"][name]["hash"] = value
        if holding is not None:
            kind = holding.optimizer.name
            self.content["optimizer"] = {"class": kind, **contents_of(holding).to_json()}
            if contents.writes:
                self.optimizer_entries = _state_entries(holding)

    def _join_run(self) -> None:
        states = self.contents.states
        launched = os.environ.get("TORCHELASTIC_RUN_ID", "none")  # torchrun's, which restarts keep
        launched = launched if launched not in ("", "none") else self.token
        self.run = self.content["run"] = self.run or saves_of(states[0]).run or launched
        for state in states:
            saves_of(state).belong_to(self.run, 0)

    def make_directory(self) -> None:
        """Rank 0 makes the directory, or one rank on each host. Every rank calls it."""
        contents, what = self.contents, "the directory of save_checkpoint"
        if self.asked.local:
            with agreeing(contents, what):
                file_operations.make_directory(self.directory)
            self.hosts = Hosts(contents, self.directory)
        try:
            with agreeing(contents, what):
                # renames on several hosts can't be one: an old part could be taken for a new one
                if self.hosts is not None and self.leads:
                    manifest.delete(self.directory)
                if self.leads:
                    manifest.begin(self.directory, self.run, self.token)
        except Exception:
            self.clean()
            raise

    def files(self) -> dict[str, tuple[dict[str, Tensor], Mapping[str, str]]]:
        """Returns the tensors and the metadata of each file that this rank writes."""
        suffix = f"{self.contents.number:05}-of-{self.contents.world_size:05}.safetensors"
        files: dict[str, Any] = {f"model-{suffix}": (self.model_entries, self.metadata)}
        if self.optimizer_entries is not None:
            files[f"optimizer-{suffix}"] = self.optimizer_entries, {}
        return files

    def send_copies(self, files: dict[str, Written]) -> None:
        """Sends what other hosts are to keep, and rank 0's part of the manifest. With `local`,
        every rank calls it.
        """
        contents, hosts = self.contents, self.hosts
        if hosts is None:
            return
        data = self.directory / f"data-{self.token}"
        sizes = sorted((name, written.nbytes) for name, written in files.items())
        parcels = hosts.copies(sizes, self.asked.replicas)
        hosts.deliver(parcels, data, data, "save_checkpoint")
        text = json.dumps(self.content) if contents.is_first else ""
        self.content = json.loads(from_rank(contents, text, 0))
        with agreeing(contents, "the number of save_checkpoint"):
            there = next_number(self.directory) if hosts.leads else 0
            number = max(there, saves_of(contents.states[0]).number + 1)
        numbers = exchange_texts(contents, str(number))
        self.content["number"] = max(map(int, numbers))

    def commit(self, files: dict[str, Written]) -> None:
        """Writes the manifest, when the files of all ranks are on the disk. Who leads calls it."""
        data = self.directory / f"data-{self.token}"
        for directory in (data, self.directory, self.directory.parent):
            file_operations.sync_directory(directory)
        number = saves_of(self.contents.states[0]).number + 1
        if self.hosts is None:
            self.content["number"] = max(next_number(self.directory), number)
        manifest.write(self.directory, self.content, dict(sorted(files.items())), self.token)

    def clean(self) -> None:
        """Removes the files of the replaced checkpoint and of failed saves. Who leads does.

        If it fails, the next save tries again.
        """
        if not self.leads:
            return
        try:
            there = (self.directory / manifest.NAME).is_file()
            if self.hosts is None:
                keep = manifest.read(self.directory).data.name if there else None
            else:  # which holds a part of the files
                content = manifest.parse(self.directory / manifest.NAME) if there else {}
                keep = content.get("data")
            manifest.clean(self.directory, keep)
            if self.directory.is_dir() and not file_operations.names_in(self.directory):
                file_operations.remove(self.directory)
            if self.asked.keep_last is not None:
                prune(self.directory.parent, self.asked.keep_last, self.run)
        except (OSError, ValueError) as error:
            _log.warning("cleaning up after a checkpoint failed: %s", error)


def _part(kind: str, span: NamedSpan, flat: Tensor) -> dict[str, Tensor]:
    return {f"{kind}:{span.name}[{span.start}:{span.stop}]": span.of(flat)}


def _state_entries(holding: Holding) -> dict[str, Tensor]:
    optimizer, entries = holding.optimizer, dict[str, Tensor]()
    for one in (one for one in holding.held if one.spans and one.mine):
        blocks = optimizer.blocks(one.group)
        for key, value in optimizer.tensors(one.group, one.parameter).items():
            if not isinstance(value, Tensor):
                continue
            flat = value.detach().reshape(-1)
            for span in one.filled:
                if (own := one.cut(span, key, value, blocks)) is not None:
                    entries |= _part(f"state:{key}", own, flat) if own.numel else {}
                elif value.dim() and not span.start:
                    entries[f"whole:{key}:{span.name}"] = value
    return entries


class Saving:
    """A checkpoint that `save_checkpoint` is writing.

    Example::

        path = f"{directory}/step-{step}"
        saving = zero3.save_checkpoint(path, model, optimizer, background=True)
        loss_of(model, batch).backward()
        saving.wait()
    """

    def __init__(self, prepared: _Prepared) -> None:
        self._prepared = prepared
        self._files = prepared.files()
        self._written: dict[str, Written] = {}
        self._error: Exception | None = None
        self._over = False
        self._thread: threading.Thread | None = None
        if prepared.asked.background:
            self._copy()
            self._thread = threading.Thread(target=self._write, name="zero3.save_checkpoint")
            self._thread.start()
            saves_of(prepared.contents.states[0]).begin(self.wait)
        else:
            self._write()

    def _copy(self) -> None:
        contents, what = self._prepared.contents, "the copies of save_checkpoint"
        # for a file of copies, if the model may be larger than memory
        places = (directory_of(state.policy) for state in contents.states)
        place = next((place for place in places if place is not None), None)
        may_fail = agreeing(contents, what)
        try:
            with may_fail if place is not None else nullcontext():
                for name, (entries, metadata) in self._files.items():
                    self._files[name] = _copied(entries, place), metadata
        except Exception:
            self._prepared.clean()
            raise

    def _write(self) -> None:
        data = self._prepared.directory / f"data-{self._prepared.token}"
        try:
            with ExitStack() as open_files:
                files: dict[str, FileIO] = {}
                for name in self._files:
                    files[name] = open_files.enter_context(file_operations.create(data / name))
                for name, (entries, metadata) in self._files.items():
                    views = as_file(entries, metadata, ours=True)
                    self._written[name] = write_hashed(files[name], views)
                # at the end, so that the disk works while later files are hashed
                for file in files.values():
                    file_operations.sync(file)
        except Exception as caught:
            self._error = caught
        self._files = {}

    def wait(self) -> None:
        """Returns when the checkpoint is complete. Every rank calls it. A second call does nothing.

        Raises:
            OSError: A rank could not write. Every rank raises the same error. The earlier
                checkpoint is still complete.
        """
        if self._thread is not None:
            self._thread.join()
        if self._over:
            return
        self._over = True
        contents = self._prepared.contents
        saves_of(contents.states[0]).end()
        log = contents.states[0].log
        log.keep("save_checkpoint")  # so that a rank that still writes is behind
        try:
            agree(contents, "the files of save_checkpoint", [], self._error)
            written = self._written.items()
            mine = json.dumps({name: [each.nbytes, each.blocks] for name, each in written})
            files: dict[str, Written] = {}
            for text in exchange_texts(contents, mine):
                files |= {name: Written(*each) for name, each in json.loads(text).items()}
            self._prepared.send_copies(files)
            with agreeing(contents, "the manifest of save_checkpoint", log=log):
                if self._prepared.leads:
                    self._prepared.commit(files)
        except BaseException:
            self._prepared.clean()
            raise
        # no rank returns before the cleaning
        with agreeing(contents, "the end of save_checkpoint", log=log):
            self._prepared.clean()
        for state in contents.states:
            saves_of(state).belong_to(self._prepared.run, self._prepared.content.get("number", 0))


@torch.no_grad()
def _copied(entries: dict[str, Tensor], directory: str | None) -> dict[str, Tensor]:
    """Copies to host memory or, where chunks rest in files, to a file in `directory`. Raises
    OSError if the disk has no room for them, and ValueError if there is no such directory any more.
    """
    found = {name: tensor.detach() for name, tensor in entries.items()}
    if directory is None:
        return {name: tensor.to("cpu", copy=True) for name, tensor in found.items()}
    files = MappedFiles(directory)
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in found.values()]
    places = torch.split(files.empty(sum(sizes), torch.uint8), sizes)
    for (name, tensor), place in zip(found.items(), places, strict=True):
        found[name] = place[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        files.rest(found[name])
    return found
