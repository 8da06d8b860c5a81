"""A chunk that rests on the host, with its gradient, if its layer computes elsewhere, or if it
rests in files.

fetch      the chunk is copied into its slice of the full buffer, on the fetch lane, and gathered
from there backup     the gradient's slice is copied to the host, on the backup lane landing    the
host waits for that copy, and makes it the chunk's gradient, or adds it to that writing    the host
waits for the copy of the fetch: at the end of a backward, or of a forward without gradients.
Between a forward with
           gradients and its backward the host goes on, and whoever asks for a chunk's values there
           waits (`WatchedParameter`)
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from ..comm.communicator import Communicator
from ..comm.streams import Fence, Lane, Mark, OnHost, Pending
from ..policy import ShardingPolicy, compute_dtype
from .autograd import as_plain_tensors
from .chunk import Chunk, Part
from .compressed import chunk_for
from .gradient_types import SEEN_WITHOUT_VALUES, DeferredGradient, each_in
from .layer_state import LayerState
from .layout import ChunkLayout
from .quantized_chunk import QuantizedChunk
from .residence import Residence
from .untouched import Span, UntouchedGradient, scale_later, touch_before_additions, watch

__all__: list[str] = []

Take = Callable[[Tensor, Tensor], None]
_Whom = Callable[[], "OffloadedChunk | None"]  # a weak reference
_Leaving = tuple[Take, list[OnHost]]


def _nobody() -> None:
    return None


def _leave_to_parent(chunk: _Whom) -> None:
    if (found := chunk()) is not None:
        found.leave_to_parent()


class WatchedParameter(nn.Parameter):
    """A parameter on the host whose values somebody else uses now. Whoever asks for them calls
    `first`: he may be about to write.

    It is made by switching a parameter's class. It is an ordinary one again when `first` has
    returned, and when the model goes on.
    """

    first: Callable[[], object]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _ASKS_NO_VALUES:
            for each in each_in([*args, *(kwargs or {}).values()]):
                if isinstance(each, WatchedParameter):
                    each.ask()
            return func(*args, **(kwargs or {}))
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))

    def ask(self) -> nn.Parameter:
        self.first()
        return self.as_usual()

    def as_usual(self) -> nn.Parameter:
        vars(self).pop("first", None)
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.ask().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.ask().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_ASKS_NO_VALUES = SEEN_WITHOUT_VALUES | {
    getattr(Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")
}


class OffloadedChunk(Chunk):
    """`shard`, the parameter that the optimizer sees, is on the host, and so is its gradient.
    `full` is where the layer computes.
    """

    def __init__(
        self,
        residence: Residence,
        device: torch.device,
        layout: ChunkLayout,
        shard: nn.Parameter,
        communicator: Communicator,
        kind: Any,
    ) -> None:
        """`kind`: the dtype of full buffers, or the quantised parameters."""
        self.residence, self.rests, self.far = residence, residence.name, residence.far
        # on the device, in the chunk's dtype, on its way to a full buffer of another dtype
        self._passing = self._nothing = torch.empty(0)
        self._read: Fence | None = None  # the end of the last copy to the device
        self._leaving: list[_Leaving] = []  # gradients on their way to the host
        # of the norms to take of gradients when they land, since clipping will ask for them
        self.norm_order: float | None = None
        # by id of a parameter: what adds straight to its gradient, if that was left unscaled
        self._additions: dict[int, Node] = {}
        self.recent: list[_Whom] = [_nobody] * 3  # the last chunks of the model that were fetched
        # the two that were fetched before this one -> the one fetched next
        self.followers: dict[tuple[_Whom, _Whom], _Whom] = {}
        super().__init__(layout, shard, communicator, kind, device)
        if residence.is_shared_by_forks:  # Python keeps the function for ever; it is small
            os.register_at_fork(after_in_child=partial(_leave_to_parent, weakref.ref(self)))

    def taken(self, nbytes: int) -> int:
        return self.residence.taken(nbytes)

    # -- the way in

    def start_fetch(self, lane: Lane) -> None:
        self._read_ahead()
        super().start_fetch(lane)

    def _read_ahead(self) -> None:
        """The chunk that was fetched next, when this one was last fetched after the same two, is
        most likely fetched next again.
        """
        (first, second, third), own = self.recent, weakref.ref(self)
        self.recent[:] = second, third, own
        if (previous := third()) is not None:
            previous.followers[first, second] = own
        self.residence.read_ahead(self.shard.data)
        if (follower := self.followers.get((second, third), _nobody)()) is not None:
            follower.residence.read_ahead(follower.shard.data)

    def make_room(self, *, as_stored: bool = False) -> None:
        super().make_room(as_stored=as_stored)
        if not self.filled:
            self._prepare_cast(self.full.tensor)

    def take_part_in_fetch(self) -> None:
        self._prepare_cast(
            self.shard if self._as_stored else torch.empty(0, dtype=self.compute_dtype)
        )
        super().take_part_in_fetch()
        self._passed()

    def _prepare_cast(self, full: Tensor) -> None:
        """Memory of the device is allocated on the compute stream, so before the lane's work is
        issued.
        """
        if self.far and full.dtype != self.shard.dtype:
            self._passing = torch.empty(
                self.shard.shape, dtype=self.shard.dtype, device=self.device
            )

    def _gather(self, full: Tensor) -> Pending:
        if not self.far:
            return super()._gather(full)
        own = full[self._own]
        if own.numel():
            values = self.shard.data
            to_copy = self.residence.to_copy_from(values)
            first = own if full.dtype == self.shard.dtype else self._passing
            first.copy_(to_copy, non_blocking=True)
            if to_copy is values:
                self._read = Fence(self.device)
            if first is not own:
                own.copy_(first)
        return self._communicator.all_gather(full, own, self.layout.bounds)

    def finish_fetch(self) -> None:
        super().finish_fetch()
        if not self.resident:
            self._passed()

    def _passed(self) -> None:
        self._passing = self._nothing
        self.residence.rest(self.shard.data)

    def release(self) -> None:
        super().release()
        self.residence.rest(self.shard.data)

    def settle(self) -> None:
        read, self._read = self._read, None
        if read is not None:
            read.synchronize()

    def settle_when_asked(self) -> list[nn.Parameter]:
        """Instead of the host, whoever asks for the values of the chunk's parameters waits. Returns
        these parameters.
        """
        return self._watch(self._read.synchronize) if self._read is not None else []

    def _watch(self, first: Callable[[], object]) -> list[nn.Parameter]:
        parameters = {
            id(each): each for each in (self.shard, *(part.parameter for part in self.parts))
        }
        for parameter in parameters.values():
            parameter.first = first  # type: ignore[attr-defined]
            parameter.__class__ = WatchedParameter
        return list(parameters.values())

    def leave_to_parent(self) -> None:
        """Called in a forked child, which has no copy of what is in files."""
        self._watch(self.residence.check_process)

    def receive(self, slices: list[Tensor] | None) -> None:
        if self.far:
            own = torch.empty(self.shard.shape, dtype=self.shard.dtype, device=self.device)
            self._communicator.scatter(own, slices, self.layout.bounds).wait()
            self.shard.data.copy_(own)
        else:
            super().receive(slices)
        self.residence.rest(self.shard.data)

    # -- the way of the gradient

    def hand_over(self, take: Take, landed: Tensor, summed: Tensor) -> None:
        if not self.far:
            self._land(take, landed, summed)
            return
        both = (landed, summed) if summed.dtype.itemsize > landed.dtype.itemsize else (landed,)
        self._leaving.append(
            (
                take,
                [
                    OnHost(each, self.residence.to_copy_into(each.numel(), each.dtype))
                    for each in both
                ],
            )
        )

    def way_home(self, mark: Mark) -> Mark:
        leaving, self._leaving = self._leaving, []
        return (
            _WayHome(mark, partial(self._arrive, leaving), at_once=self.residence.at_once)
            if self.far
            else mark
        )

    def _arrive(self, leaving: list[_Leaving]) -> None:
        """The host waits for the copies."""
        for take, copies in leaving:
            self._land(take, copies[0].tensor(), copies[-1].tensor())
        leaving.clear()

    @torch.no_grad()
    def _land(self, take: Take, landed: Tensor, summed: Tensor) -> None:
        if self.begins:
            kept = self.residence.keep(landed)
            landed, summed = (
                kept,
                self.residence.keep(summed)
                if summed.dtype.itemsize > landed.dtype.itemsize
                else kept,
            )
        ours = [part for part in self.parts if isinstance(_earlier(part), UntouchedGradient | None)]
        take(landed, summed)
        if self.norm_order is not None:
            for part in ours:
                watch(part.parameter, self.norm_order, self.spans(part))
        self.residence.rest_gradients()

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

    @property
    def begins(self) -> bool:
        """Whether the next gradient is the first one since they were zeroed."""
        return all(_earlier(part) is None for part in self.parts)

    def spans(self, part: Part) -> list[Span]:
        """The elements of a part's gradient of which clipping takes norms: a single rank's by
        parameters, as torch does.
        """
        if self._communicator.world_size > 1:
            return [(0, part.stop - part.start)]
        slots = (
            slot
            for slot in self.layout.slots
            if slot.numel and part.start <= slot.offset and slot.stop <= part.stop
        )
        return [(slot.offset - part.start, slot.stop - part.start) for slot in slots]


def _earlier(part: Part) -> Tensor | None:
    """The gradient that the next one is added to."""
    gradient = part.parameter.grad
    return gradient.earlier if isinstance(gradient, DeferredGradient) else gradient


class OffloadedQuantizedChunk(OffloadedChunk, QuantizedChunk):
    """A quantised chunk that rests on the host."""


class OffloadedLayers(list[LayerState]):
    """A model's layers that have such chunks."""

    def __init__(self) -> None:
        super().__init__()
        self._recent: list[_Whom] = [_nobody] * 3
        self._being_copied: list[nn.Parameter] = []

    def watch(self, state: LayerState) -> None:
        if state.policy.offload is not None:
            self.append(state)

    def settle(self, *, before_backward: bool = False) -> None:
        """The host waits until no device copies from a chunk that it may write now. Before a
        backward, whoever looks at a chunk waits.
        """
        for chunk in (chunk for state in self for chunk in _offloaded(state)):
            chunk.recent = self._recent
            if before_backward:
                self._being_copied += chunk.settle_when_asked()
            else:
                chunk.settle()

    def go_on(self) -> None:
        """A forward or a backward begins. It reads chunks itself, and its end settles them."""
        check_process(self)
        for parameter in self._being_copied:
            if isinstance(parameter, WatchedParameter):
                parameter.as_usual()
        self._being_copied.clear()


def _offloaded(state: LayerState) -> list[OffloadedChunk]:
    return [chunk for chunk in state.chunks if isinstance(chunk, OffloadedChunk)]


def check_process(states: Iterable[LayerState]) -> None:
    """
    Raises:
        RuntimeError: This is a forked child, and chunks of these layers rest in files, which are
            its parent's.
    """
    offloaded = (
        chunk for state in states if state.policy.offload is not None for chunk in _offloaded(state)
    )
    if (chunk := next(offloaded, None)) is not None:  # all were made in one process
        chunk.residence.check_process()


def settle(state: LayerState) -> None:
    """The host waits until no device copies from the layer's chunks."""
    for chunk in _offloaded(state):
        chunk.settle()


def chunk_of(
    residence: Residence | None,
    device: torch.device,
    layout: ChunkLayout,
    shard: nn.Parameter,
    communicator: Communicator,
    policy: ShardingPolicy,
) -> Chunk:
    """A new chunk, of parameters that are not quantised."""
    if residence is None:
        return chunk_for(layout, shard, communicator, policy)
    return OffloadedChunk(
        residence, device, layout, shard, communicator, compute_dtype(policy, shard.dtype)
    )


def quantized_chunk_of(residence: Residence | None, device: torch.device, *others: Any) -> Chunk:
    return (
        QuantizedChunk(*others)
        if residence is None
        else OffloadedQuantizedChunk(residence, device, *others)
    )


class _WayHome(NamedTuple):
    """The way of a gradient to the host. `mark`: the end of what the device does."""

    mark: Mark
    arrive: Callable[[], None]
    at_once: bool

    def wait(self) -> Mark | None:
        later = self.mark.wait()
        if later is not None:
            return self._replace(mark=later)
        if self.at_once:
            self.arrive()
            return None
        return _Arrival(self.arrive)  # at the end of the backward, so that the host goes on


class _Arrival(NamedTuple):
    arrive: Callable[[], None]

    def wait(self) -> Mark | None:
        self.arrive()
        return None
