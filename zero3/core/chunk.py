"""A chunk: this rank's slice of a layer's flat parameters, and the full buffer that it is gathered
into.

A chunk has one value on each of three axes. Its store says where the values rest, its wire how they
travel, and its face what the parameters are in the full buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ..comm.communicator import Bounds, Communicator, is_first
from ..comm.errors import NamingFailures
from ..comm.streams import Lane, Pending
from .flat import split, zero_padding
from .full_buffer import FullBuffer, Lifetime, OwnMemory
from .layout import ChunkLayout, Piece
from .sites import Face
from .ticket import Ticket

__all__: list[str] = []


# -- the store: where values rest


class Store(Protocol):
    """Where a chunk's values rest, and its gradient."""

    name: str  # in reports
    # whether that is outside of the memory that layers have: `soon`, `rest`, `settle` and `go_on`
    # are for such stores alone
    rests: bool
    far: bool  # whether it is so far that the device reads and writes copies

    def taken(self, nbytes: int) -> int:
        """What so many bytes take there, values or a gradient."""
        ...

    def lend(self, values: Tensor, into: Tensor | None) -> Tensor:
        """Of a store that is far: the values as the device reads them, copied `into` its memory in
        the current lane. Otherwise as they are.
        """
        ...

    def another(self, values: Tensor) -> Tensor:
        """The same values in another place."""
        ...

    def soon(self, chunk: Chunk) -> None:
        """The chunk is fetched now."""
        ...

    def rest(self, values: Tensor) -> None:
        """They are not needed for now."""
        ...

    def settle(self, chunk: Chunk, recent: list[Any] | None, *, before_backward: bool) -> None:
        """A forward or a backward is over. The host waits until no device reads values that it may
        write now; before a backward whoever asks for them waits. `recent`: the model's own, for
        what stores note of the chunks that were fetched last.
        """
        ...

    def go_on(self) -> None:
        """A forward or a backward begins."""
        ...

    def check_process(self) -> None:
        """
        Raises:
            RuntimeError: This is a forked child of the process whose memory this is.
        """
        ...


# -- the placement: among whom values travel


@dataclass(frozen=True, slots=True)
class Placement:
    """Among whom a chunk is gathered, and its gradients are reduced."""

    layout: ChunkLayout
    communicator: Communicator
    index: int  # which of the layout's slices is this rank's. Replicas have the same

    @classmethod
    def of(cls, layout: ChunkLayout, communicator: Communicator) -> Placement:
        return cls(layout, communicator, communicator.shard_rank)

    @property
    def place(self) -> slice:
        """This rank's slice of the full buffer."""
        return slice(*self.layout.chunk_range(self.index))


# -- the wire: how values travel to the full buffers of all ranks


class Room(NamedTuple):
    """The memory of one gather. It is allocated on the compute stream, before other ranks rely on
    this one.
    """

    received: Tensor  # from all ranks
    own: Tensor | None  # this rank's part of it, if that is written before it is sent
    lent: Tensor | None  # where a store that is far copies the values to
    bounds: Bounds
    work: Any = None


class Wire(Protocol):
    decodes: bool  # whether `behind` has anything to do

    def rounds(self, chunk: Chunk) -> bool:
        """Whether the full buffer holds other numbers than the chunk, though in its dtype."""
        ...

    def room(self, chunk: Chunk, full: Tensor, among: Placement) -> Room: ...

    def put(self, chunk: Chunk, room: Room) -> Tensor:
        """What this rank sends. It works in the lane."""
        ...

    def behind(self, chunk: Chunk, room: Room, full: Tensor) -> Callable[[], None] | None:
        """What fills the full buffer from what was received, in the lane, behind the gather."""
        ...

    def as_gathered(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        """What the chunk's values are in a full buffer of that dtype."""
        ...


class Plain:
    """As it is stored, or cast to the full buffer's dtype before it is sent."""

    decodes = False

    def rounds(self, chunk: Chunk) -> bool:
        return False

    def room(self, chunk: Chunk, full: Tensor, among: Placement) -> Room:
        casts, far = full.dtype != chunk.shard.dtype, chunk.store.far
        own = full[among.place] if casts or far else None
        lent = passing(chunk) if casts else own
        return Room(full, own if casts else None, lent if far else None, among.layout.bounds)

    def put(self, chunk: Chunk, room: Room) -> Tensor:
        values = chunk.shard.data
        if room.lent is not None:
            values = chunk.store.lend(values, room.lent)
        return values if room.own is None else room.own.copy_(values)

    def behind(self, chunk: Chunk, room: Room, full: Tensor) -> Callable[[], None] | None:
        return None

    def as_gathered(self, chunk: Chunk, dtype: torch.dtype) -> Tensor:
        return chunk.shard.data.to(dtype)


def passing(chunk: Chunk) -> Tensor | None:
    """Memory of the device for values that a store lends, on their way to be cast or encoded."""
    shard = chunk.shard
    if not chunk.store.far:
        return None
    return torch.empty(shard.shape, dtype=shard.dtype, device=chunk.device)


class Part(NamedTuple):
    """One parameter for the optimizer: elements `[start, stop)` of the chunk. It shares the chunk's
    memory and has its own gradient.
    """

    parameter: nn.Parameter
    start: int
    stop: int
    whole: bool = False  # whether it is one of the model's parameters, in its own shape
    # the numbers of its slots, also of those of which other ranks have all elements
    slots: frozenset[int] = frozenset()

    def of(self, flat: Tensor) -> Tensor:
        """The part's elements of `flat` `[S]`, in its shape. Their version is their own, since
        other parts change at other times.
        """
        if flat.shape == self.parameter.shape:  # all of them
            return flat
        return flat.data[self.start : self.stop].view(self.parameter.shape)


class ChunkParts(list[Part]):
    """What a chunk is for optimizers, and in the model's lists of parameters: the shard itself, or
    parts of it.
    """

    def __init__(self, only: Part) -> None:
        super().__init__([only])
        # whether any chunk of the model is cut into parts; then ranks may hold different numbers of
        # parts
        self.divided = False
        # the slots that are in none of the optimizer's groups, on all ranks
        self.left_out: frozenset[str] = frozenset()
        # whether the chunk trained when its layer was made: its name says so
        self.trained_at_first = only.parameter.requires_grad

    def cut(self, parts: Iterable[Part], left_out: frozenset[str]) -> None:
        """Gives optimizers these. `left_out`: slots that none of them has, on any rank."""
        self[:], self.left_out = parts, left_out

    def count_as_divided(self, divided: bool) -> None:
        """Whether any chunk of the model is cut into parts."""
        self.divided = divided

    def descend_from(self, older: ChunkParts) -> None:
        """The chunk takes the place of an older one, and its name."""
        self.trained_at_first = older.trained_at_first


@dataclass(slots=True)
class Gathering:
    """How a chunk is gathered now."""

    among: Placement  # those that gather it
    wire: Wire
    room: Room | None = None  # the memory of the gather under way
    ticket: Ticket | None = None  # that one's
    # the buffer that the face shows, from its first use on; and whether it shows values there
    seen: FullBuffer | OwnMemory | None = None
    shows_values: bool = False
    # the usual buffer, while another one is in use (see `show_whole`), and whether that one takes
    # what is stored, and is to show values
    usual: FullBuffer | OwnMemory | None = None
    exact: bool = False


class Chunk:
    """This rank's slice, `shard` `[S]`, of a layer's parameters of one dtype, either trainable or
    frozen. No class is derived from this one.
    """

    def __init__(
        self,
        whole: Placement,
        shard: nn.Parameter,
        computes: tuple[torch.dtype, torch.device],
        store: Store,
        wire: Wire,
        face: Face,
        at: Placement | None = None,
    ) -> None:
        """`computes`: the dtype of gathers and of the full buffer, and where the layer computes.
        `at`: the ranks that gather a part of all values, which this rank's slice lies in, and
        compute with that. None: they gather all values.
        """
        self.whole, self.at = whole, at or whole
        self.shard = shard  # 1-D [S], in the dtype that the optimizer updates
        self.compute_dtype, self.device = computes
        self.store, self.wire, self.face = store, wire, face
        self.parts = ChunkParts(self.undivided)
        # slots that were on meta and have no values yet; a fetch needs them filled
        self.unloaded: set[int] = set()
        self.trains = shard.requires_grad  # that of its parameters
        self._seen_version = shard._version
        self.gathering = Gathering(self.at, wire)
        self.full = self._new_buffer(self.compute_dtype)
        # what this chunk asks for; its layer may ask for more
        self.lifetime = Lifetime.CALL
        if self.resident:
            self._see()

    @property
    def undivided(self) -> Part:
        """The only part of a chunk that is none."""
        every = frozenset(range(len(self.layout.slots)))
        return Part(self.shard, 0, self.shard.numel(), slots=every)

    @property
    def views(self) -> Sequence[Tensor]:
        """The parameters in the full buffer, in the order of the slots."""
        return self.full.views

    @property
    def layout(self) -> ChunkLayout:
        """Of all values."""
        return self.whole.layout

    @property
    def index(self) -> int:
        """Which of the layout's slices is this rank's."""
        return self.whole.index

    @property
    def in_part(self) -> bool:
        """Whether this rank computes with a part of the values alone."""
        return self.at is not self.whole

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of slots that this rank's slice holds, in order. Empty slots have no piece."""
        return self.layout.pieces(self.index)

    @property
    def is_first_holder(self) -> bool:
        """Whether this rank's slice is the first that is not empty. Empty parameters, which are in
        no slice, belong to it.
        """
        return self.index == self.layout.first_holder

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.whole.communicator.world_size == 1

    @property
    def resident(self) -> bool:
        """Whether the full buffer is the chunk itself."""
        return self.full.is_chunk

    @property
    def full_nbytes(self) -> int:
        """The bytes of the full buffer; none for a part that lies whole on this rank."""
        if self.in_part and self.resident:
            return 0
        return self.at.layout.padded_numel * self.compute_dtype.itemsize

    @property
    def read_only(self) -> bool:
        """Whether its values can't be written, only loaded."""
        return self.face.read_only

    @property
    def own_dtype(self) -> torch.dtype:
        """The dtype of its parameters in the model that was sharded."""
        return self.face.own or self.shard.dtype

    @property
    def stored_as(self) -> str:
        """What reports call the numbers of the chunk: by their dtype, or by their format."""
        return self.face.name or str(self.shard.dtype).removeprefix("torch.")

    @property
    def gathered_as(self) -> str:
        """What reports call the numbers of the full buffer."""
        return self.face.name or str(self.compute_dtype).removeprefix("torch.")

    @property
    def casts(self) -> bool:
        """Whether what computes is something else than what is stored."""
        return (
            self.face.read_only or self.compute_dtype != self.shard.dtype or self.wire.rounds(self)
        )

    def stay_within(self, room: int) -> int:
        """Decides whether the full buffer stays from step to step, in `room` bytes. Returns what it
        takes of them. One that trains changes at every step.
        """
        nbytes = self.layout.padded_numel * self.compute_dtype.itemsize
        stays = not self.shard.requires_grad and not self.resident and not self.in_part
        fits = stays and nbytes <= room
        self.lifetime = Lifetime.STEPS if fits else Lifetime.CALL
        return nbytes if fits else 0

    def renew(self) -> nn.Parameter:
        """Replaces the shard by a parameter with its values and version. Returns the old one."""
        old = self.shard
        with torch.inference_mode(False):
            self.shard = nn.Parameter(old.detach(), requires_grad=old.requires_grad)
        self.shard.grad_dtype = old.grad_dtype
        return old

    def follow_requires_grad(self) -> None:
        self.trains = self.shard.requires_grad

    # -- fetch and release

    def show_whole(self, *, as_stored: bool) -> None:
        """Until the next release, the full buffer holds all values. `as_stored`: it has the chunk's
        dtype and not the compute dtype, so that they are exact.
        """
        exact, usual = as_stored and self.casts, self.gathering.usual
        if usual is None and (exact or self.in_part) and not self.full.filled:
            wire = Plain() if exact else self.wire
            self.gathering = Gathering(self.whole, wire, usual=self.full, exact=exact)
            dtype = self.shard.dtype if exact else self.compute_dtype
            self.full = self._new_buffer(dtype, self.full)

    def make_room(self) -> None:
        """[fetch 2] Allocates the full buffer, before ranks rely on the gather: memory may run out
        on one rank alone.
        """
        full, now = self.full, self.gathering
        if not full.filled:
            full.allocate()
            if not full.is_chunk:
                now.room = now.wire.room(self, full.tensor, now.among)
        if full is not now.seen:
            self._see()

    def _see(self) -> None:
        """Leads the face to the present full buffer."""
        full, now = self.full, self.gathering
        now.seen, now.shows_values = full, False
        full.show(self.face.views(full.tensor, now.among.layout))

    def start_fetch(self, lane: Lane, names: NamingFailures) -> None:
        """[fetch 3] Starts the gather. The lane waits for the compute stream: for the optimizer's
        step and the buffer's last reader.
        """
        if self.store.rests:
            self.store.soon(self)
        full, now = self.full, self.gathering
        if full.filled:
            return
        if self.parts[0].parameter is not self.shard:
            self._adopt_values_of_parts()
        if full.is_chunk:
            # the caller has set chunk.data
            if full.tensor.data_ptr() != self.shard.data_ptr():
                self.full = self._new_buffer(full.tensor.dtype, full)
                self._see()
            if now.exact:
                self._show_values()
            return
        wire = now.wire
        room = now.room or wire.room(self, full.tensor, now.among)
        ticket = Ticket(names)
        ticket.go(
            lane,
            partial(self._gather, room, wire, now.among),
            wire.behind(self, room, full.tensor) if wire.decodes else None,
            room,
        )
        now.ticket = ticket  # only now: a gather that has not begun is none

    def _gather(self, room: Room, wire: Wire, among: Placement) -> Pending:
        own = wire.put(self, room)
        return among.communicator.all_gather(room.received, own, room.bounds)

    def _gather_into(
        self, full: Tensor, wire: Wire, among: Placement, lane: Lane, names: NamingFailures
    ) -> Ticket:
        self.adopt_values()
        room, ticket = wire.room(self, full, among), Ticket(names)
        ticket.go(lane, partial(self._gather, room, wire, among), None, room)
        return ticket

    def take_part_in_gather(self, lane: Lane, names: NamingFailures) -> Ticket:
        """Starts a gather that only other ranks need. This rank sends its chunk, and drops what it
        receives.
        """
        now = self.gathering
        numel = now.among.layout.padded_numel
        full = torch.empty(numel, dtype=self.compute_dtype, device=self.device)
        return self._gather_into(full, now.wire, now.among, lane, names)

    def read(self, full: Tensor, lane: Lane, names: NamingFailures) -> Ticket:
        """Starts to gather what is stored, exactly and whole, into `full` `[W*S]`, which is the
        reader's. The chunk's own full buffer is left as it is.
        """
        return self._gather_into(full, Plain(), self.whole, lane, names)

    def adopt_values(self) -> None:
        """Copies values of a part that was given other data (`parameter.data = values`) back into
        the shard.
        """
        if self.parts[0].parameter is not self.shard:
            self._adopt_values_of_parts()

    @torch.no_grad()
    @torch.inference_mode(False)
    def _adopt_values_of_parts(self) -> None:
        address, size = self.shard.data_ptr(), self.shard.element_size()
        if all(
            part.parameter.data_ptr() == address + part.start * size
            for part in self.parts
            if part.parameter.numel()
        ):
            return
        # the caller may hold what was here, to give it back later; nothing here holds it
        self.shard.data = self.store.another(self.shard.data)
        for part in self.parts:
            home = self.shard.data[part.start : part.stop].view(part.parameter.shape)
            part.parameter.data = home.copy_(part.parameter.data)
        torch.autograd.graph.increment_version(self.shard)

    def finish_fetch(self) -> None:
        """Makes the compute stream wait for the gather."""
        now = self.gathering
        if now.ticket is not None:
            now.ticket.wait()
            now.ticket = None
            self.full.arrive()
            if now.exact:
                self._show_values()
        now.room = None
        if self.store.rests and not self.full.is_chunk:
            self.store.rest(self.shard.data)

    def _show_values(self) -> None:
        """Where codes are gathered, and values are to be shown."""
        if not self.face.read_only:
            return
        with torch.no_grad(), torch.inference_mode(False):
            values = self.face.values(self.full.tensor, self.layout)
            if not self.gathering.shows_values:
                self.full.show(values)
                self.gathering.shows_values = True
            else:  # parameters show the views already
                for view, value in zip(self.full.views, values, strict=True):
                    view.copy_(value)

    def is_stale(self) -> Tensor:
        """Whether the full buffer has to be gathered because of this rank's chunk, as a 0-dim
        tensor.
        """
        if not self.full.filled:
            return torch.ones((), dtype=torch.bool, device=self.device)
        self.adopt_values()
        now = self.gathering
        own = self.full.tensor[now.among.place]
        return (own != now.wire.as_gathered(self, own.dtype).to(own.device)).any()

    def release(self) -> None:
        if self.gathering.ticket is not None or self.gathering.room is not None:
            self.finish_fetch()
        if self.gathering.usual is not None:
            self.full, self.gathering = self.gathering.usual, Gathering(self.at, self.wire)
            self.face.forget()
        elif self.full.left:
            in_use = self.full.in_use()
            self.full = self._new_buffer(self.full.tensor.dtype, self.full)
            self.gathering.seen = None  # it is left to its users
            self.face.forget()
            # If views are still in use, versions must stay: a new version makes torch rebuild their
            # grad_fn from the base as it is now.
            if in_use():
                self.full.leave_versions()
        else:
            self.full.free()  # [release 2]
        if self.store.rests:
            self.store.rest(self.shard.data)

    def abandon_fetch(self) -> None:
        """Ends a gather that may have failed, after an exception. Its result is not used."""
        try:
            self.finish_fetch()
        except RuntimeError:
            self.gathering.ticket = self.gathering.room = None
            self.full.leave()  # the failed transfer may still write into it

    def changed(self) -> bool:
        """Whether the shard was written since the last call. If it was, a backward through older
        graphs is an error.
        """
        version = self.shard._version
        changed, self._seen_version = version != self._seen_version, version
        return changed

    # -- values from rank 0

    def scatter(self) -> None:
        """Cuts rank 0's full buffer into the chunks of all ranks."""
        if self.face.read_only:
            self.face.write(self.full.views, self.full.tensor, self.layout)
            torch.autograd.graph.increment_version(self.shard)
        zero_padding(self.full.tensor, self.layout)
        if not self.resident:
            first = is_first(self.whole.communicator)
            self.receive(split(self.full.tensor, self.layout) if first else None)
            torch.autograd.graph.increment_version(self.shard)
        self.unloaded.clear()

    def receive(self, slices: list[Tensor] | None) -> None:  # one for each rank, on rank 0
        own = passing(self)
        values = self.shard.data if own is None else own
        self.whole.communicator.scatter(values, slices, self.layout.bounds).wait()
        if own is not None:
            self.shard.data.copy_(own)
        self.store.rest(self.shard.data)

    def _new_buffer(
        self, dtype: torch.dtype, before: FullBuffer | OwnMemory | None = None
    ) -> FullBuffer | OwnMemory:
        """`before`: the one in whose place it is."""
        with torch.inference_mode(False):  # training may use the same buffer later
            among = self.gathering.among
            uncut = self.alone or (among is not self.whole and among.layout.world_size == 1)
            own = uncut and dtype == self.shard.dtype and not self.store.far
            tracks = not own if before is None else before.tracks_versions
            if own:
                shows = self.alone and not self.face.read_only
                return OwnMemory(self.shard, shows_released=shows, tracks_versions=tracks)
            numel = among.layout.padded_numel
            return FullBuffer(numel, dtype, self.device, tracks_versions=tracks)
