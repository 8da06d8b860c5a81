"""save_checkpoint: every rank writes what it holds, side by side; one rename makes it a checkpoint."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from ..access import states_of
from ..comm.agreement import agree, exchange_texts
from ..optim.check_optimizer import warn_if_inexact
from ..optim.several import Optimizers, Together
from . import file_operations
from .optimizer_contents import Held, held_by
from .preparing import Prepared
from .safetensors_writing import Entry, Written, write_file

__all__: list[str] = []


def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    extra: Any = None,
    weights: bool = True,
    frozen: bool = True,
    keep_last: int | None = None,
    background: bool = False,
) -> Saving:
    """Saves model, optimizer and `extra` in the directory `path`. Every rank writes what it holds; nothing is gathered.

    Saved are parameters, buffers, modules' extra state (`get_extra_state`, rank 0's), the optimizer's groups and state by parameter
    name, and every rank's random generators. The new
    checkpoint appears in one rename, when everything is on the disk. After a failure before that, a crash or a full disk on any
    rank, the earlier checkpoint is still there, under `path` too, and the next save cleans up. Files are hashed meanwhile.

    Args:
        path: A directory of a file system that all ranks see. Parents are created. A checkpoint that is there is replaced, and
            other files are left alone.
        model: Any model that contains zero3 layers.
        optimizer: One over `get_trainable_chunk(model)`, `param_groups(model, ...)` or `model.parameters()`. Several that share
            the model (Muon for matrices, AdamW for the rest) come in a list or a dict; order and keys do not matter.
        extra: None, numbers, strings, lists, tuples, dicts and tensors, as state dicts are made of. Rank 0's is saved.
        weights: False leaves all parameters out, where they are saved elsewhere (with `save_pretrained`, say). `load_checkpoint` is
            told so too.
        frozen: False leaves frozen parameters out. (Under LoRA adapters they can be loaded with `load_pretrained`.)
        keep_last: When this checkpoint is there, all but the newest so many beside `path` are deleted. None deletes none.
        background: Return when everything is copied to host memory, and write from a thread. The checkpoint appears when every
            rank has called `wait()`, some steps later; the next save or load of the model calls it too.

    Returns:
        A `Saving`. Without `background` there is nothing to wait for.

    Raises:
        TypeError: `extra`, extra state of a module, an option or a state of the optimizer holds something that could only be
            pickled; or `keep_last` is no integer.
        ValueError: Nothing in `model` is sharded, an optimizer is of another model, two hold one parameter, ranks save different
            things or have made different steps, or `keep_last` is less than 1. On every rank, before anything is written.
        RuntimeError: Parameters have no values, or the call is inside `full_params` or `resident`.
        OSError: A rank could not write. Every rank raises the same error.

    Example::

        extra = {"step": step, "schedule": schedule.state_dict()}
        zero3.save_checkpoint(f"{directory}/step-{step}", model, optimizer, extra=extra, keep_last=3)
    """
    saving = Saving(_prepare(path, model, optimizer, (extra, weights, frozen, keep_last, background)), background)
    if not background:
        saving.wait()
    return saving


def _prepare(
    path: str | os.PathLike[str], model: nn.Module, optimizer: Optimizers | None, how: tuple[Any, bool, bool, int | None, bool]
) -> Prepared:
    """Everything that can be found wrong before a file is made, on every rank."""
    first = states_of(model)[0]
    first.log.look()  # a checkpoint of ranks that have come apart would replace a good one
    if first.unfinished is not None:
        first.unfinished()
    extra, weights, frozen, keep_last, background = how
    prepared: Prepared | None = None
    together: Together | None = None
    held: list[Held] = []
    error: Exception | None = None
    try:
        prepared = Prepared(path, model, extra, (weights, frozen), keep_last)
        if optimizer is not None:
            together = Together(optimizer)
            held = held_by(together, prepared.contents)
            for member in together.members:
                warn_if_inexact(prepared.contents.states, member)
    except Exception as caught:  # whatever it is, the others wait to hear of it
        error = caught
    lines = (
        [*prepared.lines(), f"optimizer: {together.name if together is not None else None}", f"background: {background}"]
        if prepared is not None
        else []
    )
    agree(first.communicator, first.device, "save_checkpoint", lines, error)
    if prepared is None:
        raise RuntimeError("agree returned though there was an error")
    prepared.gather_entries(together, held)
    prepared.make_directory()
    return prepared


class Saving:
    """A checkpoint that `save_checkpoint` is writing.

    Example::

        saving = zero3.save_checkpoint(f"{directory}/step-{step}", model, optimizer, background=True)
        loss_of(model, batch).backward()
        saving.wait()
    """

    def __init__(self, prepared: Prepared, background: bool) -> None:
        self._prepared = prepared
        self._files = prepared.files()
        self._written: dict[str, Written] = {}
        self._error: Exception | None = None
        self._over = False
        self._thread: threading.Thread | None = None
        if background:
            self._files = {name: ([_copied(entry) for entry in entries], more) for name, (entries, more) in self._files.items()}
            self._thread = threading.Thread(target=self._write, name="zero3.save_checkpoint")
            self._thread.start()
            prepared.contents.states[0].unfinished = self.wait
        else:
            self._write()

    def _write(self) -> None:
        data = self._prepared.directory / f"data-{self._prepared.token}"
        try:
            with ExitStack() as open_files:
                files = {name: open_files.enter_context(file_operations.create(data / name)) for name in self._files}
                for name, (entries, metadata) in self._files.items():
                    self._written[name] = write_file(files[name], entries, metadata)
                for file in files.values():  # last, so that the disk does not wait for us
                    file_operations.sync(file)
        except Exception as caught:
            self._error = caught
        self._files = {}

    def wait(self) -> None:
        """Returns when the checkpoint is there. Every rank calls it; a second call returns at once.

        Raises:
            OSError: A rank could not write: the same on every rank. The earlier checkpoint is still there.
        """
        if self._thread is not None:
            self._thread.join()
        if self._over:
            return
        self._over = True
        contents = self._prepared.contents
        contents.states[0].unfinished = None
        try:
            agree(contents.communicator, contents.device, "the files of save_checkpoint", [], self._error)
            mine = json.dumps({name: [written.nbytes, written.blocks] for name, written in self._written.items()})
            texts = exchange_texts(contents.communicator, contents.device, mine)
            files = {name: Written(*written) for text in texts for name, written in json.loads(text).items()}
            self._on_first(lambda: self._prepared.commit(files), "the manifest of save_checkpoint")
        except BaseException:
            self._prepared.clean()
            raise
        self._on_first(self._prepared.clean, "the end of save_checkpoint")  # so that every rank finds only what is to stay

    def _on_first(self, work: Callable[[], None], subject: str) -> None:
        error: Exception | None = None
        if self._prepared.contents.rank == 0:
            try:
                work()
            except Exception as caught:
                error = caught
        agree(self._prepared.contents.communicator, self._prepared.contents.device, subject, [], error)


def _copied(entry: Entry) -> Entry:
    return entry._replace(tensor=entry.tensor.detach().to("cpu", copy=True))
