"""load_checkpoint: all hashes first, then every rank reads the ranges that it holds, whatever the ranks were that wrote them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..access import states_of
from ..comm.agreement import agree
from ..comm.plain_values import decode
from ..core.parameters import own_name
from ..optim.several import Optimizers, Together
from . import manifest, random_state
from .contents import Contents, differences
from .extra_state import extra_state_modules, set_extra_states
from .manifest import Manifest
from .meta_buffers import initialise, put
from .optimizer_contents import Held, OptimizerContents, contents_of, held_by
from .optimizer_placing import Placing, place
from .ranges import Ranges
from .safetensors_files import SafetensorsFiles, Stored

__all__: list[str] = []

_log = logging.getLogger("zero3")


def load_checkpoint(path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers | None = None, *, weights: bool = True) -> Any:
    """Fills model and optimizer from a checkpoint of `save_checkpoint`, on any number of ranks and with any choice of layers.

    Every rank calls it. First the ranks read all files once, each its share, and compare hashes. Then each rank reads the ranges
    that it holds, straight into its chunks. Parameters that were left out (`frozen=False`) are left alone. Modules take the extra
    state that was saved (`set_extra_state`). Random generators are set on the ranks whose number took part in the save.

    Args:
        path: The checkpoint's directory.
        model: It has the parameters that were saved, by their names in the unwrapped model; on the meta device, or with values.
        optimizer: Over the parameters that were saved. State that it has is replaced. Several come in a list or a dict, in any
            order: each takes the state of its parameters. None: the checkpoint's optimizer state is not read.
        weights: False leaves the parameters alone, for a checkpoint that was saved without them, or a model that has them.

    Returns:
        `extra`, as rank 0 saved it. Tensors in it are on the CPU.

    Raises:
        ValueError: There is no checkpoint; a file is truncated, changed, missing or foreign; names, shapes or dtypes differ;
            it holds no optimizer state and `optimizer` is given; or it holds state that this optimizer would not keep (another
            class's, or of other options). On every rank, before anything has changed.
        RuntimeError: The call is inside `full_params` or `resident`; or a read failed: then the parameters that it was to fill
            count as unloaded.

    Example::

        latest = zero3.latest_checkpoint(directory)
        if latest is not None:
            extra = zero3.load_checkpoint(latest, model, optimizer)
            schedule.load_state_dict(extra["schedule"])
    """
    first = states_of(model)[0]
    if first.unfinished is not None:
        first.unfinished()
    loader = _Loader(path, model, optimizer, weights)
    try:
        return loader.load()
    finally:
        loader.close()


class _Loader:
    def __init__(self, path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers | None, weights: bool) -> None:
        self._path = path
        self._weights = weights
        self._model = model
        self._given = optimizer
        self._optimizer: Together | None = None
        self._first = states_of(model)[0]
        self._files: SafetensorsFiles | None = None
        self._stored: dict[str, Stored] = {}
        self._placing: Placing | None = None

    def load(self) -> Any:
        found, contents, held = self._verify()
        error: Exception | None = None
        try:
            self._files = SafetensorsFiles(found.data, [name for kind in self._kinds() for name in found.names(kind)])
            self._stored = {own_name(name): stored for name, stored in self._files.tensors.items()}
            self._ranges = Ranges(self._files)
            self._check(found, contents)
        except Exception as caught:
            error = _as_value_error(found, caught)
        if self._given is None:
            agree(self._first.communicator, self._first.device, "the contents of load_checkpoint", [], error)
        else:
            self._plan(found, contents, held, error)
        return self._fill(found, contents)

    def _kinds(self) -> list[str]:
        return ["model"] if self._given is None else ["model", "optimizer"]

    def _verify(self) -> tuple[Manifest, Contents, list[Held]]:
        """That the files are what was saved, and the same on every rank."""
        communicator, device = self._first.communicator, self._first.device
        error: Exception | None = None
        found: Manifest | None = None
        contents: Contents | None = None
        held: list[Held] = []
        try:
            contents = Contents(self._model, "load_checkpoint")
            if self._given is not None:
                self._optimizer = Together(self._given)
                held = held_by(self._optimizer, contents)
            found = manifest.read(self._path)
            if isinstance(tensors := found.content.get("tensors"), dict):  # saved by a zero3 that kept the names of wrappers
                found.content["tensors"] = {own_name(name): described for name, described in tensors.items()}
            if self._given is not None and found.content["optimizer"] is None:
                raise ValueError(f"{self._path} was saved without an optimizer: load it without one, and begin with a fresh optimizer")
        except OSError as caught:
            error = ValueError(f"{self._path} can't be read: {caught}")
        except Exception as caught:  # whatever it is, the others wait to hear of it
            error = caught
        lines = [f"{manifest.NAME}: {found.content['data']}", f"of: {', '.join(self._kinds())}"] if found is not None else []
        agree(communicator, device, "the checkpoint that load_checkpoint found", lines, error)
        if found is None or contents is None:
            raise RuntimeError("agree returned though there was an error")
        try:
            names = [name for kind in self._kinds() for name in found.names(kind)]
            manifest.verify(found, sorted(names, key=lambda name: name.partition("-")[2]), communicator.rank, communicator.world_size)
        except (OSError, ValueError) as caught:
            error = ValueError(str(caught))
        agree(communicator, device, "the hashes of load_checkpoint", [], error)
        return found, contents, held

    def _check(self, found: Manifest, contents: Contents) -> None:
        """That it fits the model."""
        saved, expected = found.content["tensors"], contents.description()
        self._untie(saved, contents)
        if problems := differences(expected, saved) + self._strange_extra_states(found):
            raise ValueError(f"the checkpoint does not fit this {type(self._model).__name__}; nothing was loaded. {'. '.join(problems)}")
        left_out = [name for name in contents.parameters if not saved[name]["stored"] and contents.trains(name)]
        if left_out and self._weights:
            what = "frozen parameters" if any(saved[name]["stored"] for name in contents.parameters) else "weights"
            raise ValueError(f"{self._path} was saved without {what}, and these are trained here: {', '.join(left_out)}")
        for name in contents.parameters:
            if saved[name]["stored"] and self._weights:
                shape, dtype = saved[name]["shape"], saved[name]["dtype"]
                self._ranges.check("parameter", name, torch.Size(shape).numel(), dtype)
        for name in contents.others:
            if f"other:0:{name}" not in self._stored:  # of a system that does not tell buffers from parameters
                self._ranges.check("parameter", name, torch.Size(saved[name]["shape"]).numel(), saved[name]["dtype"])

    def _untie(self, saved: dict[str, Any], contents: Contents) -> None:
        """Systems that do not know of ties store a tied parameter under each of its names: one is enough, if all say the same."""
        for first, *others in contents.names.values():
            for name in (other for other in others if first in saved and other in saved):
                numel = torch.Size(saved[first]["shape"]).numel()
                if saved[name] != saved[first] or not self._ranges.same("parameter", first, name, numel):
                    raise ValueError(f"{self._path}: {first} and {name} are one parameter here, and have different values there")
                del saved[name]

    def _strange_extra_states(self, found: Manifest) -> list[str]:
        saved, here = found.content.get("extra_states"), extra_state_modules(self._model)
        if saved is None:  # of a zero3 that left them out
            if here and self._first.communicator.rank == 0:
                _log.warning("%s holds no extra state, and these modules have one: %s. It stays as it is", self._path, ", ".join(here))
            return []
        missing, unknown = [name for name in here if name not in saved], [name for name in saved if name not in here]
        problems = [f"missing: {', '.join(missing)}"] if missing else []
        return problems + ([f"unknown: {', '.join(unknown)}"] if unknown else [])

    def _plan(self, found: Manifest, contents: Contents, held: list[Held], error: Exception | None) -> None:
        optimizer = self._optimizer
        if optimizer is None:
            return
        own = contents_of(optimizer, held, contents, error, with_state=False)
        try:
            source = OptimizerContents.from_json(found.content["optimizer"])
            self._placing = place(optimizer, held, own, source, contents)
            for name, state in source.state.items():
                for key, dtype in state.elements.items():
                    self._ranges.check(f"state:{key}", name, torch.Size(contents.shape(name)).numel(), dtype)
        except Exception as caught:
            error = error or _as_value_error(found, caught)
        agree(contents.communicator, contents.device, "the optimizer of load_checkpoint", [], error)

    def _fill(self, found: Manifest, contents: Contents) -> Any:
        """From here on values change. If a read fails, what was to be filled counts as unloaded: half-filled is worse."""
        error: Exception | None = None
        others: dict[str, Tensor] = {}
        computed: list[tuple[str, Tensor]] = []
        stored = [name for name in contents.parameters if self._weights and found.content["tensors"][name]["stored"]]
        try:
            for target in self._placing.targets if self._placing is not None else []:
                self._ranges.read(f"state:{target.key}", target.span.name, target.span.start, target.place)
            for name, key, tensor in self._placing.whole if self._placing is not None else []:
                tensor.copy_(self._tensor(f"whole:{key}:{name}"))
            others = {name: self._other(name, contents) for name in contents.others}
            extra = decode(found.content["extra"], lambda number: self._tensor(f"extra:{number}"))
            saved = found.content.get("extra_states") or {}
            extra_states = {name: decode(value, lambda number: self._tensor(f"extra:{number}")) for name, value in saved.items()}
            self._fill_chunks(contents, set(stored))
            computed = initialise(self._model, contents.states)
        except Exception as caught:
            error = RuntimeError(f"reading {found.data} failed: {caught}. What it was to fill is unloaded now: load again.")
        try:
            names = [name for name, _ in computed]
            agree(contents.communicator, contents.device, "what load_checkpoint filled", names, error)
        except Exception:
            for name in stored:
                contents.parameters[name].chunk.unloaded.add(contents.parameters[name].index)
            raise
        for name, value in others.items():
            put(self._model, contents.others[name], value.to(contents.device))
        for _, value in computed:
            if value.numel():
                contents.communicator.broadcast(value)
        if self._placing is not None:
            self._placing.commit()
        set_extra_states(self._model, extra_states, contents.communicator, contents.device, "load_checkpoint")
        self._restore_random(found, contents)
        return extra

    def _fill_chunks(self, contents: Contents, stored: set[str]) -> None:
        for state in contents.states:
            state.release()  # what is still fetched, after a forward, is about to be old
        for chunk in contents.chunks():
            for name, start, stop, offset in contents.spans(chunk):
                if name in stored:
                    self._ranges.read("parameter", name, start, chunk.shard.data[offset : offset + stop - start])
        for name in stored:
            contents.parameters[name].chunk.unloaded.discard(contents.parameters[name].index)
        torch.autograd.graph.increment_version([chunk.shard for chunk in contents.chunks()])  # graphs built before are stale

    def _tensor(self, name: str) -> Tensor:
        if (stored := self._stored.get(name)) is None:
            raise ValueError(f"there is no {name!r}")
        value = torch.empty(stored.shape, dtype=stored.dtype)
        self._opened().read(stored, 0, value.view(-1))
        return value

    def _other(self, name: str, contents: Contents) -> Tensor:
        """This rank's own, if it had one that differed."""
        for stored in (f"other:{contents.rank}:{name}", f"other:0:{name}"):
            if stored in self._stored:
                return self._tensor(stored)
        value = torch.empty(contents.shape(name), dtype=contents.dtype(name))
        self._ranges.read("parameter", name, 0, value.view(-1))
        return value

    def _opened(self) -> SafetensorsFiles:
        if self._files is None:
            raise RuntimeError("no files are open")
        return self._files

    def _restore_random(self, found: Manifest, contents: Contents) -> None:
        names = found.names("model")
        if contents.rank < len(names) and "random" in self._opened().metadata[names[contents.rank]]:  # a converted one has none
            tensors = {kind: self._tensor(f"random:{contents.rank}:{kind}") for kind in self._kinds_of_random(contents.rank)}
            random_state.restore(contents.device, tensors, self._opened().metadata[names[contents.rank]]["random"])

    def _kinds_of_random(self, rank: int) -> Iterator[str]:
        prefix = f"random:{rank}:"
        return (name.removeprefix(prefix) for name in self._opened().tensors if name.startswith(prefix))

    def close(self) -> None:
        if self._files is not None:
            self._files.close()


def _as_value_error(found: Manifest, error: Exception) -> Exception:
    """What a manifest says may be anything; whoever reads it trips over what is not as a save writes it."""
    if isinstance(error, ValueError | OSError):
        return error
    return ValueError(f"{found.directory / manifest.NAME} is malformed: {type(error).__name__}: {error}")
