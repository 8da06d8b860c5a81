"""Chunks and gradients in memory-mapped files. The kernel keeps in memory what is in use."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ..core.chunk import Chunk, Part
from ..core.chunk_gradient import DeferredGradient
from ..core.flow import Add, Travelling
from ..core.gradient_buffer import GradientBuffer
from ..scratch.mapped_files import MappedFiles
from ..scratch.nameless_file import GrowingFile
from .resting import Keeping, watch_values
from .untouched import Span, UntouchedGradient, scale_later, touch_before_additions, watch

__all__: list[str] = []

_Whom = Callable[[], Chunk | None]  # a weak reference


def _nobody() -> None:
    return None


def _leave_to_parent(chunk: _Whom) -> None:
    """Called in a forked child, which has no copy of what is in files."""
    if (found := chunk()) is not None and isinstance(found.store, Files):
        watch_values(found, found.store.check_process)


class Files:
    """Files in a directory: one chunk's place there. See `Resting` and `Keeping`."""

    name = "files"
    rests = True
    at_once = True

    def __init__(self, directory: str, *, far: bool) -> None:
        self.far = far
        file = GrowingFile(directory)
        self._values, self._gradients = MappedFiles(directory, file), MappedFiles(directory, file)
        self.allocate, self.check_process = self._values.empty, self._values.check_process
        self._used_at_once: Callable[[], bool] = lambda: False
        self._is_short = False
        self._recent: list[Any] = []  # the last chunks of the model that were fetched
        # the two that were fetched before this one -> the one fetched next
        self._followers: dict[tuple[_Whom, _Whom], _Whom] = {}
        # of the norms to take of gradients when they land, since clipping will ask for them
        self.norm_order: float | None = None
        # by id of a parameter: what adds straight to its gradient, if that was left unscaled
        self._additions: dict[int, Node] = {}

    def belong_to(self, chunk: Chunk) -> None:
        # Python keeps the function for ever; it is small
        os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(chunk)))

    def taken(self, nbytes: int) -> int:
        return nbytes

    def reserve(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        _ = [self._gradients.empty(numel, dtype) for dtype in dtypes]

    # -- values

    def another(self, values: Tensor) -> Tensor:
        return self.allocate(values.numel(), values.dtype).copy_(values)

    def lend(self, values: Tensor, into: Tensor | None) -> Tensor:
        if into is None:
            return values
        if into.numel():
            into.copy_(values.pin_memory(), non_blocking=True)
        return into

    def soon(self, chunk: Chunk) -> None:
        """The chunk that was fetched next, when this one was last fetched after the same two, is
        most likely fetched next again.
        """
        own: _Whom = weakref.ref(chunk)
        hash(own)  # it is a key later, when the chunk may be gone: a reference remembers its hash
        recent = self._recent
        if not recent:
            recent.extend([_nobody] * 3)
        first, second, third = recent
        recent[:] = second, third, own
        if (previous := third()) is not None and isinstance(previous.store, Files):
            previous.store._followers[first, second] = own
        self.read_ahead(chunk.shard.data)
        if (follower := self._followers.get((second, third), _nobody)()) is not None:
            follower.store.read_ahead(follower.shard.data)  # type: ignore[attr-defined]

    def rest(self, values: Tensor) -> None:
        self._values.rest(values)

    def settle(self, chunk: Chunk, recent: list[Any] | None, *, before_backward: bool) -> None:
        if recent is not None:  # a device reads copies, so there is nothing to wait for
            self._recent = recent

    def go_on(self) -> None:
        self.check_process()

    # -- for the optimizer's turns (`offload_optimizer`)

    def read_ahead(self, tensor: Tensor) -> None:
        """Values, or a gradient, are needed soon."""
        for files in (self._values, self._gradients):
            files.read_ahead(tensor)

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        """Brings values, or a gradient, into memory, and returns when they are there: for a thread
        beside compute.
        """
        for files in (self._values, self._gradients):
            files.bring(tensor, to_write=to_write)

    def is_away(self, tensor: Tensor) -> bool:
        """Whether values, or a gradient, had to leave memory, because it is short."""
        return any(files.is_away(tensor) for files in (self._values, self._gradients))

    def write(self, values: Tensor) -> None:
        """Values that have changed go to the disk. Returns when they are there: for a thread beside
        compute.
        """
        self._values.write(values, wait=True)

    def is_used_at_once(self, by: Callable[[], bool]) -> None:
        """`by`: whether a gradient is used up as soon as it has landed, so that it need not rest
        anywhere.
        """
        self._used_at_once = by

    def note_short(self, is_short: bool) -> None:
        """Whether memory was short in the last step: gradients had been dropped. Then they are
        written early.
        """
        self._is_short = is_short

    # -- gradients

    def to_copy_into(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, pin_memory=True)

    def keep(self, gradient: Tensor) -> Tensor:
        kept = None if self._used_at_once() else self._gradients.put(gradient, "a gradient")
        if kept is None:
            return gradient
        if self._is_short:
            with suppress(OSError):  # whoever needs the gradient will hear of it
                self._gradients.write(kept, wait=False)
        return kept

    def rest_gradients(self) -> None:
        self._gradients.rest_all()

    # -- clipping

    def take_norms(self, order: float) -> None:
        """From now on norms are taken when gradients land."""
        self.norm_order = order

    def scale_later(self, part: Part, factor: Tensor) -> bool:
        """Leaves the multiplication of a gradient for later. Returns False if it has to be now: see
        `untouched`.
        """
        parameter, key = part.parameter, id(part.parameter)
        if parameter.grad is None or not scale_later(parameter.grad, factor):
            return False
        if key not in self._additions and (node := touch_before_additions(parameter)) is not None:
            self._additions[key] = node
        return True


class PutAway:
    """In place of `Add`: a gradient that lands goes into the files, unless it is added to one
    there.
    """

    lane = ""
    has_room = False

    def __init__(self, store: Keeping) -> None:
        self._store, self._add = store, Add()

    def take_room(self, gradient: Travelling, buffer: GradientBuffer) -> None:
        return None

    def __call__(self, gradient: Travelling) -> None:
        store, chunk = self._store, gradient.account.chunk
        if all(_earlier(part) is None for part in chunk.parts):
            exact = gradient.exact
            landed = store.keep(gradient.landed)
            gradient.moves_to(landed, None if exact is None else store.keep(exact))
        ours = [
            part for part in chunk.parts if isinstance(_earlier(part), UntouchedGradient | None)
        ]
        self._add(gradient)
        if store.norm_order is not None:
            for part in ours:
                watch(part.parameter, store.norm_order, spans(chunk, part))
        store.rest_gradients()


def _earlier(part: Part) -> Tensor | None:
    """The gradient that the next one is added to."""
    gradient = part.parameter.grad
    return gradient.earlier if isinstance(gradient, DeferredGradient) else gradient


def spans(chunk: Chunk, part: Part) -> list[Span]:
    """The elements of a part's gradient of which clipping takes norms: a single rank's by
    parameters, as torch does.
    """
    if not chunk.alone:
        return [(0, part.stop - part.start)]
    slots = (
        slot
        for slot in chunk.layout.slots
        if slot.numel and part.start <= slot.offset and slot.stop <= part.stop
    )
    return [(slot.offset - part.start, slot.stop - part.start) for slot in slots]
