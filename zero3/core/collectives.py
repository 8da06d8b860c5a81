"""What ranks do together, and who conducts it.

A collective is a value: what is done, and with which layer. A rank performs it. Or it takes part in
it with nothing to give, because it has no data, or because its micro-batch has failed. Marks are
conducted alike, and move nothing: a layer begins to compute, a forward is over.

A model gives each of them to a conductor. Conductors wrap each other: one compares, notes,
announces or times what passes, and gives it to the next. `Straight` is the last, and usually alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from ..comm.agreement import Members, agree
from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from .full_buffer import Lifetime

__all__: list[str] = []


class Activity(IntEnum):
    """A phase of a rank's work with its model. Under `Join`, ranks meet at the first collective of
    each phase.
    """

    FORWARD = 0
    BACKWARD = 1
    STEP = 2
    OTHER = 3  # a collective that belongs to none of these


class Collective(Protocol):
    """Two of them are equal if they do the same with the same layer. What this rank gives stands
    in a field `mine`.
    """

    moves: ClassVar[bool]  # whether ranks transfer anything; otherwise it is a mark

    @property
    def layer(self) -> Any: ...

    def perform(self) -> Any: ...

    def take_part(self) -> Any:
        """Has nothing to give, but the other ranks do."""
        ...


class Conductor(Protocol):
    def conduct(self, what: Collective, *, absent: bool = False) -> Any:
        """Performs it, or takes part in it if this rank is `absent`. Returns what that returns."""
        ...


@runtime_checkable
class Wraps(Conductor, Protocol):
    inner: Conductor  # the next one of the chain


class Straight:
    """Performs each collective, and does nothing else."""

    def conduct(self, what: Collective, *, absent: bool = False) -> Any:
        return what.take_part() if absent else what.perform()


def chain(conductor: Conductor) -> Iterator[Conductor]:
    """It, and those that it wraps."""
    yield conductor
    if isinstance(conductor, Wraps):
        yield from chain(conductor.inner)


def without(one: Wraps, outer: Conductor) -> Conductor:
    """The chain that begins with `outer`, and `one` taken out."""
    if outer is one:
        return one.inner
    if isinstance(outer, Wraps):
        outer.inner = without(one, outer.inner)
    return outer


@dataclass(frozen=True)
class Round:
    """A mark: a forward or a backward begins, or is over. `error`: it has raised."""

    layer: Any  # the model's first
    activity: Activity
    begins: bool
    error: BaseException | None = field(default=None, compare=False)
    moves: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"{'begins' if self.begins else 'ends'} a {self.activity.name.lower()}"

    def perform(self) -> None:
        return None

    take_part = perform


@dataclass(frozen=True, slots=True)
class Use:
    """A mark: a function of the caller's uses the model between forwards and backwards, or an
    optimizer steps it. What the function moves is not conducted.
    """

    layer: Any  # one of those that are used
    by: str
    moves: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"begins {self.by}"

    def perform(self) -> None:
        return None

    take_part = perform


@dataclass(slots=True, unsafe_hash=True)  # frozen, each field would cost a call
class Fetch:
    """A mark: the layer's gather is waited for, and started before if it is not under way. When it
    has been performed the layer computes. Not `gathers`: it computes without its parameters.
    """

    layer: Any
    gathers: bool = True
    moves: ClassVar[bool] = False

    def __str__(self) -> str:
        return f"computes in layer {self.layer.label}"

    def perform(self) -> None:
        if self.gathers:
            self.layer.start_fetch()
            self.layer.finish_fetch()

    take_part = perform


@dataclass(slots=True, unsafe_hash=True)  # frozen, each field would cost a call
class Gather:
    """A layer's chunks are gathered. There is room for them already."""

    layer: Any
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"gathers layer {self.layer.label}"

    def perform(self) -> None:
        self.layer.chunks.gather()

    def take_part(self) -> None:
        self.layer.take_part_in_gather()


@dataclass(slots=True, unsafe_hash=True)  # frozen, each field would cost a call
class Reduce:
    """A layer's gradients are reduced. `in_replica`: in each replica alone, and the sums are kept
    for a later backward.
    """

    layer: Any
    in_replica: bool
    reductions: Any = field(compare=False)  # the model's
    mine: Any = field(default=None, compare=False)  # prepared
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        alone = " in its replica alone" if self.in_replica else ""
        return f"reduces the gradients of layer {self.layer.label}{alone}"

    def perform(self) -> Any:
        """Returns its tickets."""
        return self.layer.gradients.back_up(self.mine, self.layer.chunks.lanes)

    def take_part(self) -> None:
        """With zeros."""
        defers = int(self.in_replica and self.layer.gradients.may_reduce)
        self.layer.gradients.defer(defers, replicas_only=True)
        try:
            self.reductions.start(self.layer, absent=True)
        finally:
            self.layer.gradients.defer(-defers, replicas_only=True)


@dataclass(frozen=True, slots=True)
class Settle:
    """What goes on after reductions is waited for: sums over replicas, which need the waits of all
    ranks.
    """

    layer: Any
    reductions: Any = field(compare=False)  # the model's
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return "waits for its gradients"

    def perform(self) -> None:
        self.reductions.drain()

    take_part = perform


@dataclass(frozen=True, slots=True)
class Agree:
    """Ranks compare what they will do next.

    Raises:
        ValueError: Another rank does something else. Every rank raises it.
    """

    layer: Any
    place: str
    words: tuple[str, ...]
    communicator: Communicator = field(compare=False)
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return "has come to a layer that was not foreseen"

    def perform(self) -> None:
        agree(Members(self.communicator, self.layer.device), self.place, self.words)

    def take_part(self) -> None:
        """As a listener."""
        agree(Members(self.communicator, self.layer.device), "what comes next", None)


@dataclass(frozen=True, slots=True)
class CompareLogs:
    """Ranks compare the transfers of all layers so far. Returns True. Whoever compares them
    at the end of each activity leaves it out. `tells`: nobody waits for it, and the next one
    compares.

    Raises:
        ValueError: Ranks have made different transfers. Every rank raises it.
    """

    layer: Any
    communicator: Communicator = field(compare=False)
    tells: bool
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return "compares its transfers"

    def perform(self) -> bool:
        log, device = self.layer.chunks.log, self.layer.device
        if self.tells:
            log.tell(self.communicator, device)
        else:
            agree(Members(self.communicator, device), "the transfers made so far", [log.summary()])
        return True

    take_part = perform


@dataclass(frozen=True, slots=True)
class Look:
    """Finds full buffers that stay from step to step, but whose chunk has changed on any rank: they
    are gathered again.
    """

    layer: Any
    layers: Sequence[Any] = field(compare=False)
    communicator: Communicator = field(compare=False)
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return "begins a forward"

    def staying(self) -> list[tuple[Any, Any]]:
        """Layers and chunks."""
        return [
            (state, chunk)
            for state in self.layers
            if not state.pins.resident
            for chunk in state.chunks
            if state.stays(chunk) and not chunk.resident
        ]

    def perform(self) -> None:
        staying = self.staying()
        if not staying:
            return
        stale = torch.stack([chunk.is_stale() for _, chunk in staying]).to(torch.uint8)
        if self.communicator.world_size > 1:
            which = Subject("which layers have changed")
            with NamingFailures(self.communicator, "comparing", which):
                self.communicator.all_reduce(stale, maximum=True)
        self.forget(each for each, flag in zip(staying, stale.tolist(), strict=True) if flag)

    take_part = perform

    def forget(self, stale: Iterable[tuple[Any, Any]]) -> None:
        for state, chunk in stale:
            chunk.full.forget()
            state.release(Lifetime.PASS)
