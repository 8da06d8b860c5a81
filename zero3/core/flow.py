"""The way of a chunk's gradient, from autograd's tensors to `chunk.grad`: stages, in lanes.

    plain             ReduceScatter | Average  Add
    with replicas     ReduceScatter | KeepInReplica  SumReplicas | Average  Add
    far from here     ReduceScatter | Average  Home | Add

What stands behind a bar follows a transfer, in its lane. A transfer and what follows it are a leg.

Behind a slice `[S]` travels a trailer `[n]`, which no stage knows until `Average`: for each slot,
how many gradients have reached it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..comm.communicator import Averages, Bounds, Communicator
from ..comm.errors import NamingFailures
from ..comm.streams import Done, Lane, Lanes, Pending, Then
from .chunk import Chunk, Part
from .gradient_buffer import GradientBuffer
from .reached import Reached
from .ticket import Ticket

__all__: list[str] = []


@dataclass(slots=True)
class Among:
    """The ranks among which a layer's gradients are reduced."""

    communicator: Communicator  # asked where values are asked of all ranks
    averaged_over: int  # the number of ranks for the mean: fewer if some have no data left
    sums: Communicator  # those that have a share in them

    def ask(self, communicator: Communicator) -> None:
        self.communicator = communicator

    def average_over(self, ranks: int) -> None:
        self.averaged_over = ranks


class LandsGradients(Protocol):
    """Whose gradient it is, and where its way ends: an `Account`."""

    chunk: Chunk
    among: Among
    added_as: torch.dtype

    def exchange_partial(self, summed: Tensor | None) -> Tensor | None: ...

    def land(self, landed: Tensor, exact: Tensor | None, reached: Reached | None) -> None: ...


@dataclass(slots=True, eq=False)
class Travelling:
    """A gradient on its way. It has all the memory that the way needs before the way begins."""

    account: LandsGradients
    communicator: Communicator  # over which it is reduced
    # what is sent to each rank, as it lies in autograd's gradients; otherwise it is in `full`
    pieces: list[list[Tensor]] | None = None
    full: Tensor | None = None  # 1-D [W*(S+n)]
    # the slots that it has reached; None: all of them, on this rank already
    reached: Reached | None = None
    divided: bool = False  # whether `full` was divided for the mean already
    # 1-D [S+n], takes the sum over ranks; where there is one shard it is `full`
    summed: Tensor = field(init=False)
    # 1-D [S+n], takes the mean in the chunk's gradient's dtype; it lands as [S]
    landed: Tensor = field(init=False)
    exact: Tensor | None = None  # the sum, if it is wider than what lands
    work: Any = None  # what else a stage needs until compute has waited for the sum
    ends_early: bool = False  # whether it ends with the first leg
    lanes: Lanes = field(init=False)
    # weakly, since its legs refer to the gradient; it is alive whenever a stage runs
    ticket: Callable[[], Ticket] = field(init=False)

    def moves_to(self, landed: Tensor, exact: Tensor | None = None) -> None:
        """It is somewhere else from now on."""
        self.landed, self.exact = landed, exact
        self.summed = landed if exact is None else exact


class Stage(Protocol):
    # of a stage that moves data: "backup", "replicas" or "host"; "": it works in the lane of the
    # stage before it
    lane: str
    has_room: bool  # whether `take_room` has anything to do

    def take_room(self, gradient: Travelling, buffer: GradientBuffer) -> None:
        """Allocates its memory, on the compute stream, before other ranks rely on this one:
        memory may run out on one rank alone. `buffer`: the gradients of this rank.
        """
        ...

    def __call__(self, gradient: Travelling) -> Pending | None: ...


class Flow:
    """The stages of one chunk's gradients, in legs."""

    def __init__(
        self, *stages: Stage, typed: Callable[[Part, Tensor], Tensor], at_once: bool = False
    ) -> None:
        """`typed`: makes what has landed in a part of the type that its gradient has. `at_once`:
        the host waits for the last leg together with the one before.
        """
        self.stages, self.typed, self._at_once = stages, typed, at_once
        self._with_room = [stage for stage in stages if stage.has_room]
        first = [at for at, stage in enumerate(stages) if stage.lane]
        self._legs = [
            stages[at:end] for at, end in zip(first, [*first[1:], len(stages)], strict=True)
        ]

    def take_room(
        self, account: LandsGradients, communicator: Communicator, buffer: GradientBuffer
    ) -> Travelling:
        """[backup 1]"""
        gradient = Travelling(account, communicator)
        for stage in self._with_room:
            stage.take_room(gradient, buffer)
        return gradient

    def start(
        self, gradient: Travelling, lanes: Lanes, names: NamingFailures, *, ends_early: bool = False
    ) -> Ticket:
        """[B5] Starts to reduce it. `ends_early`: it stays in this replica."""
        ticket = Ticket(names, [part.parameter.grad for part in gradient.account.chunk.parts])
        gradient.lanes, gradient.ticket = lanes, weakref.ref(ticket)  # type: ignore[assignment]
        gradient.ends_early = ends_early
        self._go(0, gradient)
        return ticket

    def _go(self, number: int, gradient: Travelling) -> None:
        mover = self._legs[number][0]
        start: Callable[[], Any] = partial(mover, gradient)  # a mover's result is no None
        behind = partial(self._behind, number, gradient)
        ticket, held = gradient.ticket(), (gradient.summed, gradient.landed, gradient.reached)
        if mover.lane == "backup":
            ticket.go(gradient.lanes.backup, start, behind, (*held, gradient.full, gradient.work))
            # this leg alone holds them
            gradient.full = gradient.work = None
        elif mover.lane == "replicas":
            ticket.follow(cast(Lane, gradient.lanes.replicas), start, behind, held)
        else:
            ticket.arrive(Then(start() or Done(), behind), at_once=self._at_once)

    def _behind(self, number: int, gradient: Travelling) -> None:
        # in a backward it is off already, and entering no_grad costs time
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._behind(number, gradient)
        for stage in self._legs[number][1:]:
            stage(gradient)
        if number + 1 < len(self._legs) and not gradient.ends_early:
            self._go(number + 1, gradient)


class ReduceScatter:
    """[backup 2] Sums over the ranks that share the chunk: each gets its slice."""

    lane = "backup"
    has_room = True

    def __init__(
        self,
        bounds: Bounds,
        dtype: torch.dtype,
        *,
        divides_first: int = 1,
        averages: bool = False,
    ) -> None:
        """`divides_first`: a part of the division for the mean. fp16 overflows at 65504.
        `averages`: the transfer divides by the number of its ranks.
        """
        self._bounds, self._dtype, self._divides_first = bounds, dtype, divides_first
        self._averages = averages

    def take_room(self, gradient: Travelling, buffer: GradientBuffer) -> None:
        take_gradients(gradient, buffer, self._dtype, self._divides_first)
        chunk, full = gradient.account.chunk, gradient.full
        numel = chunk.shard.numel() + buffer.layout.trailer
        gradient.summed = (
            full
            if full is not None and chunk.at.layout.world_size == 1
            else torch.empty(numel, dtype=self._dtype, device=chunk.device)
        )

    def __call__(self, gradient: Travelling) -> Pending:
        communicator, full, pieces = gradient.communicator, gradient.full, gradient.pieces
        gradient.pieces = None  # the transfer holds them as long as it needs them
        if full is not None and self._divides_first > 1 and not gradient.divided:
            full.div_(self._divides_first)
        if pieces is not None:
            return communicator.reduce_pieces(gradient.summed, pieces)
        if full is None or full is gradient.summed:
            return Done()
        if self._averages:
            return cast(Averages, communicator).reduce_to_mean(gradient.summed, full)
        return communicator.reduce_scatter(gradient.summed, full, self._bounds)


def take_gradients(
    gradient: Travelling, buffer: GradientBuffer, dtype: torch.dtype, divides_first: int = 1
) -> None:
    """Takes this rank's gradients out, zeros for slots without one. Micro-batches may have been
    added up in a wider dtype than that in which they are sent.
    """
    slots, chunk = len(buffer.layout.of.slots), gradient.account.chunk
    if buffer.missing and not chunk.in_part:
        alone = gradient.communicator.world_size == 1
        told = None if alone else torch.empty(slots, dtype=torch.bool, device=chunk.device)
        gradient.reached = Reached([*buffer.written, *buffer.came], told)
    takes_pieces = gradient.communicator.takes_pieces and divides_first == 1
    gradient.pieces = buffer.pieces() if takes_pieces else None
    full = buffer.complete() if gradient.pieces is None else None
    if full is not None and full.dtype != buffer.made_in:
        gradient.divided = divides_first > 1
        full = (full.div_(divides_first) if gradient.divided else full).to(buffer.made_in)
    gradient.full = full


class Average:
    """The mean, in the dtype of the chunk's gradient. It is divided in the wider of both
    dtypes.
    """

    lane = ""
    has_room = True

    def __init__(self, dtype: torch.dtype, *, mean: bool, divided: int = 1) -> None:
        """`divided`: by how much the stages before do it, whoever has data. It is a power of two,
        so that what is left here, such as 3/4, gives the bits of one division.
        """
        self._dtype, self._mean, self._divided = dtype, mean, divided

    def take_room(self, gradient: Travelling, buffer: GradientBuffer) -> None:
        summed = gradient.summed
        same = summed.dtype == self._dtype
        gradient.landed = summed if same else torch.empty_like(summed, dtype=self._dtype)
        gradient.exact = summed if summed.dtype.itemsize > self._dtype.itemsize else None

    def __call__(self, gradient: Travelling) -> None:
        """[backup 3]"""
        summed, landed = gradient.summed, gradient.landed
        divisor = gradient.account.among.averaged_over / self._divided if self._mean else 1
        narrows = gradient.exact is not None
        if narrows and divisor != 1:
            summed.div_(divisor)
        if landed is not summed:
            landed.copy_(summed)
        if not narrows and divisor != 1:
            landed.div_(divisor)
        numel = gradient.account.chunk.shard.numel()
        if numel < landed.numel():
            if gradient.reached is not None:
                gradient.reached.listen(landed[numel:])
            exact = gradient.exact
            gradient.landed = landed[:numel]
            gradient.exact = None if exact is None else exact[:numel]


class Add:
    """[backup 4] Adds it to the chunk's gradient."""

    lane = ""
    has_room = False

    def take_room(self, gradient: Travelling, buffer: GradientBuffer) -> None:
        return None

    def __call__(self, gradient: Travelling) -> None:
        gradient.account.land(gradient.landed, gradient.exact, gradient.reached)
