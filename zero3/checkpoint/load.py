"""load_checkpoint(): ranks compare all hashes first. Then every rank reads the ranges of its own
chunks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from typing import Any

import torch
from torch import Tensor, nn

from ..access import states_of, used_together
from ..comm.agreement import agreeing
from ..comm.plain_values import decode
from ..core.parameters import ShardedParameter
from ..modules import named
from ..optim.several import Optimizers
from ..quantized.sections import StoredRows
from . import manifest, random_state
from .contents import Contents, NamedSpan, differences, names_apart
from .extra_state import extra_state_modules, set_extra_states
from .hosts import PartsOfHosts, parts_of
from .lazy import Lazy
from .manifest import Manifest
from .meta_buffers import filling, put
from .numbered import saves_of
from .placing import Placing, place
from .ranges import Ranges
from .safetensors_files import SafetensorsFiles
from .saved_optimizer import Holding, OptimizerContents, contents_of
from .value_hashes import value_hashes

__all__: list[str] = []

_log = logging.getLogger("zero3")


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    weights: bool = True,
) -> Any:
    """Fills model and optimizer from a checkpoint of `save_checkpoint`, on any number of ranks and
    with any choice of layers.

    Of a checkpoint that was saved with `local=True`, hosts are sent the files that their ranks need
    and do not see, in pieces of at most 16 MiB. They keep them in their directory.

    Every rank calls it. First the ranks read all files once, each a share, and compare hashes. Then
    each rank reads the ranges of its own chunks, into the chunks' memory. Parameters that were not
    saved (`frozen=False`) keep their values. These have to be the values that the model was saved
    over: their hashes are compared. (A warning names the number of those that have no values yet.)
    Modules take the saved extra state (`set_extra_state`). A rank takes the random generators of
    the rank with its number, if there was one.

    Args:
        path: The checkpoint's directory.
        model: A model with the parameters that were saved, under their names in the unwrapped
            model; on the meta device, or with values.
        optimizer: Over the parameters that were saved. Its state is replaced. Pass several as a
            list or a dict, in any order: each takes the state of its parameters. None: the
            checkpoint's optimizer state is not read.
        weights: False keeps the parameters' values, for a checkpoint that was saved without them,
            or for a model that has them already.

    Returns:
        `extra`, as rank 0 saved it. Tensors in it are on the CPU.

    Raises:
        ValueError: There is no checkpoint; a file is truncated, changed, missing or foreign; names,
            shapes or dtypes differ; a parameter that was not saved has other values; `optimizer` is
            given and the checkpoint holds no optimizer state; or it holds state that this optimizer
            would not keep (of another class, or with other options); or ranks differ in
            `weights`. Every rank raises it, before anything has changed.
        TypeError: `path` is no path, or `optimizer` no optimizer. Every rank raises it.
        RuntimeError: The call is inside `full_params` or `resident`; or a read failed, and the
            parameters that it should have filled count as unloaded.

    Example::

        latest = zero3.latest_checkpoint(directory)
        if latest is not None:
            extra = zero3.load_checkpoint(latest, model, optimizer)
            schedule.load_state_dict(extra["schedule"])
    """
    saves_of(used_together(model, "load_checkpoint")[0]).finish()
    return _Loader(path, model, optimizer, weights).load()


class _Loader:
    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizers | None,
        weights: bool,
    ) -> None:
        self._path = path
        self._weights = weights
        self._model = model
        self._given = optimizer
        # of the files that are read
        self._kinds = ["model"] if optimizer is None else ["model", "optimizer"]
        self._first = states_of(model)[0]
        self._files: SafetensorsFiles
        self._holding: Holding | None = None
        self._placing: Placing | None = None
        self._state: dict[tuple[str, str], Lazy] = {}  # of the optimizer, by name and key
        # quantised parameters that were saved as 0.1 stored them, and lie in rows here
        self._in_one_row: set[str] = set()
        self._parts: PartsOfHosts | None = None  # of a checkpoint that lies on several hosts

    def load(self) -> Any:
        self._parts = parts = parts_of(self._path, self._first)
        with ExitStack() as opened:
            if parts is not None:
                opened.callback(parts.clean)
            found, contents = self._found()
            if parts is None:
                self._verify(found, contents)
            else:  # what lies on several hosts is hashed where it is read, or sent from
                found = parts.assemble(self._names(found))
            with self._agreeing("the contents of load_checkpoint"), manifest.reading(found):
                self._open(found, opened)
                self._check(found, contents)
                needed = self._needed(found, contents) if parts is not None else set()
            if parts is not None:
                others = parts.bring(needed)
                with self._agreeing("what has come to load_checkpoint"), manifest.reading(found):
                    self._open(found, opened)
                    self._files.leave_out(others)
            self._compare_base(found, contents)
            if self._holding is not None:
                self._plan(found, self._holding)
            return self._fill(found, contents)

    def _open(self, found: Manifest, opened: ExitStack) -> None:
        files = SafetensorsFiles(found.data, self._names(found))
        self._files = opened.enter_context(closing(files))
        self._ranges = Ranges(files)

    def _needed(self, found: Manifest, contents: Contents) -> set[str]:
        """The files from which this rank reads."""
        models = found.names("model")  # rank 0's holds what all share
        needed = {models[0], *models[contents.number : contents.number + 1]}
        for chunk in contents.chunks():
            for span in contents.spans(chunk):
                numel = torch.Size(contents.shape(span.name)).numel()
                needed |= self._ranges.files_of(span.name, numel, span.start, span.stop)
        return needed & set(self._names(found))

    def _agreeing(self, subject: str) -> AbstractContextManager[list[str]]:
        first, caller = self._first, "load_checkpoint"
        return agreeing(first, subject, caller, first.log)

    def _names(self, found: Manifest) -> list[str]:
        return [name for kind in self._kinds for name in found.names(kind)]

    def _found(self) -> tuple[Manifest, Contents]:
        """Reads the manifest. All ranks have found the same one."""
        with self._agreeing("the checkpoint that load_checkpoint found") as lines:
            contents = Contents(self._model, "load_checkpoint")
            if self._given is not None:
                self._holding = Holding(self._given, contents)
            try:
                if self._parts is not None:
                    self._parts.check()
                found = manifest.read(self._path) if self._parts is None else self._parts.found
            except OSError as error:
                raise ValueError(f"{self._path} can't be read: {error}") from error
            if self._given is not None and found.content["optimizer"] is None:
                raise ValueError(
                    f"{self._path} was saved without an optimizer: load it without one, and begin "
                    "with a fresh optimizer"
                )
            lines += [f"{manifest.NAME}: {found.content['data']}", f"weights: {self._weights}"]
            lines.append(f"of: {', '.join(self._kinds)}")
        return found, contents

    def _verify(self, found: Manifest, contents: Contents) -> None:
        """Compares the hashes of all files. Each rank reads its share."""
        names = sorted(self._names(found), key=lambda name: name.partition("-")[2])
        with self._agreeing("the hashes of load_checkpoint"):
            try:
                manifest.verify(found, names, contents.number, contents.world_size)
            except OSError as error:
                raise ValueError(str(error)) from error

    def _check(self, found: Manifest, contents: Contents) -> None:
        """Raises ValueError if the checkpoint does not fit the model."""
        saved, expected = found.content["tensors"], contents.description()
        self._untie(found, contents)
        for name in contents.parameters:
            rows, shape = contents.rows(name), saved.get(name, {}).get("shape")
            if rows is not None and shape == [rows.whole_nbytes]:
                self._in_one_row.add(name)
                expected[name]["shape"] = shape
        extra_states = names_apart(extra_state_modules(self._model), found.content["extra_states"])
        if problems := differences(expected, saved) + extra_states:
            raise ValueError(
                f"the checkpoint does not fit this {type(self._model).__name__}; nothing was "
                f"loaded. {'. '.join(problems)}"
            )
        names = contents.parameters
        stored = [name for name in names if saved[name]["stored"]]
        left_out = [n for n in names if not saved[n]["stored"] and contents.trains(n)]
        if left_out and self._weights:
            what = "frozen parameters" if stored else "weights"
            raise ValueError(
                f"{self._path} was saved without {what}, and these are trained here: "
                f"{', '.join(left_out)}"
            )
        for name in [*(stored if self._weights else ()), *contents.others]:
            self._saved(found, name)  # raises if it is not all there

    def _compare_base(self, found: Manifest, contents: Contents) -> None:
        """Raises ValueError if frozen parameters that were not saved have other values here."""
        saved = found.content["tensors"]
        hashed = [name for name in contents.parameters if self._weights and "hash" in saved[name]]
        bare = [name for name in hashed if contents.is_empty(name)]
        there = [name for name in hashed if name not in bare]
        here = value_hashes(contents, there, "load_checkpoint")
        if other := [name for name, value in here.items() if value != saved[name]["hash"]]:
            raise ValueError(
                f"{self._path} was saved with frozen=False, over another base than this "
                f"{type(self._model).__name__} has; nothing was loaded. {len(other)} of "
                f"{len(here)} frozen parameters have other values: {named(other)}. Load the base "
                "that it was trained on first (zero3.load_pretrained)."
            )
        if bare and contents.is_first:
            what = "%s was saved over a base, and is loaded before it: %d frozen parameters have "
            _log.warning(f"{what}no values yet", self._path, len(bare))

    def _untie(self, found: Manifest, contents: Contents) -> None:
        """Removes further names of tied parameters. Systems that know no ties store a value for
        each name; the values have to be equal.
        """
        saved = found.content["tensors"]
        for first, *others in contents.names.values():
            for name in (other for other in others if first in saved and other in saved):
                both = (self._saved(found, each).pieces() for each in (first, name))
                if saved[name] != saved[first] or any(a != b for a, b in zip(*both, strict=True)):
                    raise ValueError(
                        f"{self._path}: {first} and {name} are one parameter here, and have "
                        "different values there"
                    )
                del saved[name]

    def _plan(self, found: Manifest, holding: Holding) -> None:
        own = contents_of(holding, with_state=False)
        with self._agreeing("the optimizer of load_checkpoint"), manifest.reading(found):
            source = OptimizerContents.from_json(found.content["optimizer"])
            self._placing = place(holding, own, source)
            for name, state in source.state.items():
                for key, (dtype, shape) in state.tensors(holding.contents.shape(name)).items():
                    self._state[name, key] = self._ranges.tensor(f"state:{key}", name, shape, dtype)

    def _fill(self, found: Manifest, contents: Contents) -> Any:
        """Changes values."""
        saved = found.content["tensors"]
        stored = {
            name: sharded
            for name, sharded in contents.parameters.items()
            if self._weights and saved[name]["stored"]
        }
        with filling(self._model, contents.states, found.data, stored.values(), "load_checkpoint"):
            if self._placing is not None:  # the new state, which the optimizer does not hold yet
                for name, key, start, values in self._placing.targets:
                    self._state[name, key].read(start or 0, values.view(-1))
            others: dict[str, Tensor] = {}
            for name in contents.others:  # this rank's own value, if there is one, or all ranks'
                own = self._files.tensors.get(f"other:{contents.number}:{name}")
                others[name] = (own or self._saved(found, name)).tensor()
            extra = decode(found.content["extra"], self._extra)
            extra_states = {
                name: decode(value, self._extra)
                for name, value in found.content["extra_states"].items()
            }
            self._fill_chunks(found, contents, stored)
        for name, value in others.items():
            put(self._model, contents.others[name], value.to(contents.device))
        if self._placing is not None:
            self._placing.commit()
        set_extra_states(self._model, extra_states, contents, "load_checkpoint")
        self._restore_random(found, contents)
        run, number = found.content.get("run"), int(found.content.get("number", 0))
        for state in contents.states:
            saves_of(state).belong_to(run, number)  # later checkpoints belong to it too
        return extra

    def _fill_chunks(
        self, found: Manifest, contents: Contents, stored: Mapping[str, ShardedParameter]
    ) -> None:
        for state in contents.states:
            state.release()  # a full buffer that a forward has left would hold old values
        for chunk in contents.chunks():
            for span in contents.spans(chunk):
                if span.name in stored:
                    kept = span.of(chunk.shard.data)
                    self._read(self._saved(found, span.name), span, contents.rows(span.name), kept)
        for sharded in stored.values():
            sharded.chunk.unloaded.discard(sharded.index)
        # graphs built before are stale
        torch.autograd.graph.increment_version([chunk.shard for chunk in contents.chunks()])

    def _read(self, saved: Lazy, span: NamedSpan, rows: StoredRows | None, kept: Tensor) -> None:
        if rows is None or span.name not in self._in_one_row:
            saved.read(span.start, kept)
            return
        offsets = {section.name: section.offset for section in rows.whole}

        def read(section: str, byte: int, target: Tensor) -> None:
            saved.read(offsets[section] + byte, target)

        rows.fill(span.start, kept, read)

    def _saved(self, found: Manifest, name: str) -> Lazy:
        described = found.content["tensors"][name]
        return self._ranges.tensor("parameter", name, described["shape"], described["dtype"])

    def _extra(self, number: int) -> Tensor:
        if (stored := self._files.tensors.get(f"extra:{number}")) is None:
            raise ValueError(f"there is no 'extra:{number}'")
        return stored.tensor()

    def _restore_random(self, found: Manifest, contents: Contents) -> None:
        prefix = f"random:{contents.number}:"
        for file in found.names("model")[contents.number : contents.number + 1]:
            metadata = self._files.metadata[file]
            if "random" in metadata:  # a converted one has none
                stored = self._files.tensors.items()
                own = {n.removeprefix(prefix): each for n, each in stored if n.startswith(prefix)}
                tensors = {kind: each.tensor() for kind, each in own.items()}
                random_state.restore(contents.device, tensors, metadata["random"])
