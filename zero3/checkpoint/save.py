"""save_checkpoint(): every rank writes its own part, and one rename makes the files a checkpoint."""

from __future__ import annotations

import json
import os
import threading
from contextlib import ExitStack, nullcontext
from typing import Any

from torch import nn

from ..access import states_of
from ..comm.agreement import agree, agreeing, exchange_texts
from ..optim.check_optimizer import warn_if_inexact
from ..optim.several import Optimizers, Together
from ..optim.state_memory import land_steps
from . import file_operations
from .copies import copied, place_of_copies
from .optimizer_contents import Held, held_by
from .preparing import Prepared
from .safetensors_writing import Written, write_file

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
    run: str | None = None,
    background: bool = False,
) -> Saving:
    """Saves model, optimizer and `extra` in the directory `path`. Every rank writes its own part, and nothing is gathered.

    A checkpoint holds parameters, buffers, modules' extra state (rank 0's `get_extra_state`), the optimizer's groups and state by
    parameter name, and every rank's random generators. On a mesh with replicas the first one writes what they share. A checkpoint
    appears by one rename, when all files are on the disk. If a rank fails before that (a crash, a full disk), the earlier checkpoint
    under `path` is still complete, and the next save cleans up. Files are hashed while they are written.

    Args:
        path: A directory of a file system that all ranks see. Parents are created. A checkpoint in it is replaced, and other files
            are left alone.
        model: Any model that contains zero3 layers.
        optimizer: One over `get_trainable_chunk(model)`, `param_groups(model, ...)` or `model.parameters()`. Pass several that
            share the model (Muon for matrices, AdamW for the rest) as a list or a dict; order and keys do not matter.
        extra: Any nesting of None, numbers, strings, lists, tuples, dicts and tensors. Rank 0's is saved.
        weights: False leaves out all parameters, if they are saved elsewhere (by `save_pretrained`, say). Pass it to `load_checkpoint`
            too.
        frozen: False leaves frozen parameters out, and keeps a hash of the values of each. (With LoRA adapters, `load_pretrained` can
            load them.) `load_checkpoint` refuses a model with other values.
        keep_last: How many checkpoints of this run stay in the parent directory of `path`, the newest ones. None: all stay. Those of
            other runs stay, and those that name no run.
        run: The name of the run that the checkpoint belongs to. None: that of the checkpoint that the model was loaded from or saved in
            last; for the first one torchrun's `TORCHELASTIC_RUN_ID` (unless it is "none"), or a new random name.
        background: Return when everything is copied to host memory, and write from a thread. The checkpoint appears when every
            rank has called `wait()`, some steps later. The next save or load of the model calls it too. (With `offload=DIR` the copy
            is a file without a name in that directory, and takes no memory.)

    Returns:
        A `Saving`. Without `background` there is nothing to wait for.

    Raises:
        TypeError: `extra`, a module's extra state, or an option or a state of the optimizer holds a value that could only be
            pickled; `keep_last` is no integer, or `run` is no text.
        ValueError: Nothing in `model` is sharded, an optimizer is of another model, two optimizers hold one parameter, ranks save
            different things or have made different steps, `keep_last` is less than 1, `run` is empty, or with `background` the directory of
            `offload` is gone. Every rank raises it, before anything is written.
        RuntimeError: Parameters have no values, or the call is inside `full_params` or `resident`.
        OSError: A rank could not write, or has no room for the copies of `background`; or, with `offload=DIR`, its disk has lost what
            a step of the optimizer's has changed. Every rank raises the same error.

    Example::

        extra = {"step": step, "schedule": schedule.state_dict()}
        zero3.save_checkpoint(f"{directory}/step-{step}", model, optimizer, extra=extra, keep_last=3)
    """
    saving = Saving(_prepare(path, model, optimizer, (extra, weights, frozen, background), (keep_last, run)), background)
    if not background:
        saving.wait()
    return saving


def _prepare(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers | None,
    how: tuple[Any, bool, bool, bool],
    stays: tuple[int | None, str | None],
) -> Prepared:
    """Finds all mistakes before a file is made. Every rank raises them."""
    first = states_of(model)[0]
    first.log.look()  # if ranks have made different transfers, a checkpoint of them must not replace a good one
    if first.unfinished is not None:
        first.unfinished()
    extra, weights, frozen, background = how
    together: Together | None = None
    held: list[Held] = []
    with agreeing(first.communicator, first.device, "save_checkpoint") as lines:
        prepared = Prepared(path, model, extra, (weights, frozen), stays)
        land_steps(prepared.contents.states)
        if optimizer is not None:
            together = Together(optimizer)
            held = held_by(together, prepared.contents)
            for member in together.members:
                warn_if_inexact(prepared.contents.states, member)
        lines += [*prepared.lines(), f"optimizer: {together.name if together is not None else None}", f"background: {background}"]
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
            self._copy()
            self._thread = threading.Thread(target=self._write, name="zero3.save_checkpoint")
            self._thread.start()
            prepared.contents.states[0].unfinished = self.wait
        else:
            self._write()

    def _copy(self) -> None:
        contents, place = self._prepared.contents, place_of_copies(self._prepared.contents.states)
        try:
            with agreeing(contents.communicator, contents.device, "the copies of save_checkpoint") if place is not None else nullcontext():
                self._files = {name: (copied(entries, place), more) for name, (entries, more) in self._files.items()}
        except Exception:
            self._prepared.clean()
            raise

    def _write(self) -> None:
        data = self._prepared.directory / f"data-{self._prepared.token}"
        try:
            with ExitStack() as open_files:
                files = {name: open_files.enter_context(file_operations.create(data / name)) for name in self._files}
                for name, (entries, metadata) in self._files.items():
                    self._written[name] = write_file(files[name], entries, metadata)
                for file in files.values():  # at the end, so that the disk works while later files are hashed
                    file_operations.sync(file)
        except Exception as caught:
            self._error = caught
        self._files = {}

    def wait(self) -> None:
        """Returns when the checkpoint is complete. Every rank calls it. A second call returns at once.

        Raises:
            OSError: A rank could not write. Every rank raises the same error. The earlier checkpoint is still complete.
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
            with agreeing(contents.communicator, contents.device, "the manifest of save_checkpoint"):
                if contents.is_first:
                    self._prepared.commit(files)
        except BaseException:
            self._prepared.clean()
            raise
        with agreeing(contents.communicator, contents.device, "the end of save_checkpoint"):  # no rank returns before the cleaning
            self._prepared.clean()
