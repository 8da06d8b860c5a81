"""A rank of a world that is not there: its communicator, which moves nothing and writes down what
it was asked to move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..comm.communicator import Bounds, Communicator
from ..comm.log import Told
from ..comm.streams import Done, HostLane, Lanes, Pending
from ..policy import ShardingPolicy, rests_in
from ..scratch.regions import pinned_nbytes

__all__: list[str] = []

_OF_OTHERS = 1 << 40  # from here on transfers of another group are numbered

Kind = Literal["fetch", "backup", "replicas"]


@dataclass(frozen=True, slots=True)
class Issued:
    """A transfer begins on its lane."""

    number: int
    lane: Kind
    nbytes: int  # that the rank receives, and sends, if all goes straight to where it belongs


@dataclass(frozen=True, slots=True)
class Awaited:
    """Compute waits for a transfer."""

    number: int


Event = Issued | Awaited
Around = Callable[[], AbstractContextManager[object]]


class OnPaper:
    """Where chunks rest with `offload`: nowhere, but what they would take is written down.

    `resting`: around what is made. `far`: the device is a GPU.
    """

    rests = True
    norm_order = None

    def __init__(self, resting: Around, *, in_files: bool, far: bool) -> None:
        self._resting, self._in_files, self.far, self.at_once = resting, in_files, far, in_files
        self.name = "files" if in_files else "host memory"

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        with self._resting():
            memory = torch.empty(self.taken(nbytes), dtype=torch.uint8, device="meta")
        return memory[:nbytes].view(dtype)

    to_copy_into = allocate

    def taken(self, nbytes: int) -> int:
        return pinned_nbytes(nbytes) if self.far and not self._in_files else nbytes

    def another(self, values: Tensor) -> Tensor:
        return self.allocate(values.numel(), values.dtype)

    def lend(self, values: Tensor, into: Tensor | None) -> Tensor:
        """What comes from a file passes through pinned memory."""
        if into is None or not into.numel():
            return into if into is not None else values
        passed = self.another(values) if self._in_files else values.detach()
        return into.copy_(passed)

    def go_on(self, *_: object, **__: object) -> None:
        """Nothing has to come, to be written or to be waited for."""

    belong_to = settle = check_process = rest_gradients = reserve = rest = soon = go_on

    def keep(self, gradient: Tensor) -> Tensor:
        return self.another(gradient).copy_(gradient) if self._in_files else gradient


class AbsentRanks:
    """Rank `rank` of `world_size`. The others are thought to do as it does, and at once.
    `replicas`: so many ranks hold the same chunk.

    `pieces`: gradients travel from where autograd made them, and what is sent is written into
    memory of the host, as on gloo between processes of one host. Otherwise they travel in a flat
    buffer, and land as soon as they are on their lane, as with NCCL.
    """

    on_paper = True
    channel = 0

    def __init__(self, world_size: int, *, pieces: bool, rank: int = 0, replicas: int = 1) -> None:
        self.rank, self.world_size, self.shards = rank, world_size, world_size // replicas
        self.replica, self.shard_rank = divmod(rank, self.shards)
        self.takes_pieces = pieces and self.shards > 1
        self.tags_messages = pieces or world_size == 1
        self._replicas = replicas
        self.tell: Callable[[Event], object] = lambda event: None
        self.making: Around = nullcontext
        self._resting: Around = nullcontext
        self._moving = 0  # bytes of the transfer that was asked for last
        # whether what follows a transfer is given to its lane with it, as on a device with streams
        self.lands_at_once = not pieces
        self._lanes: Lanes | None = None
        self._count = 0

    @property
    def averages(self) -> bool:
        """As NCCL does."""
        return self.lands_at_once and self.world_size.bit_count() == 1

    def count_as(self, *, making: Around, resting: Around) -> None:
        """`making`: around what is made for a transfer alone. `resting`: where chunks rest."""
        self.making, self._resting = making, resting

    def observed_by(self, observer: Callable[[Event], object]) -> None:
        self.tell = observer

    # -- layers' transfers

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        return self._move(full.nbytes - shard.nbytes, shard)

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        moving = self._move(full.nbytes - shard.nbytes, shard)
        return _Adding(self, shard, [full], self.shards) if self.takes_pieces else moving

    reduce_to_mean = reduce_scatter

    def reduce_pieces(self, shard: Tensor, pieces: Sequence[Sequence[Tensor]]) -> Pending:
        self._move(shard.nbytes * (self.shards - 1), shard)
        return _Adding(self, shard, pieces[self.shard_rank], self.shards)

    def sum_replicas(self, shard: Tensor) -> Pending:
        """On gloo more than two replicas each add up a part, and gather the parts."""
        parts = self._replicas if self._replicas > 2 else 1
        own = shard[: -(-shard.numel() // parts)]
        self._move(2 * shard.nbytes * (self._replicas - 1) // self._replicas, own)
        if self.lands_at_once or parts == 1:
            return Done()
        with self.making():
            return _Adding(self, torch.empty_like(own), [shard], parts)

    average_replicas = sum_replicas

    def all_to_all(
        self, received: Tensor, sent: Tensor, bounds: Bounds = None, into: Bounds = None
    ) -> Pending:
        moved = sent.nbytes - received.nbytes // self.shards
        if into is None:
            return self._move(moved, sent)
        # rows of tokens, which the computation waits for
        self._count += 1
        self.tell(Issued(self._count, "fetch", moved))
        self.tell(Awaited(self._count))
        return Done()

    def _move(self, nbytes: int, sent: Tensor) -> Pending:
        self._moving = nbytes
        if not self.lands_at_once and self.world_size > 1:
            with self.making():
                # written, and read by the other ranks, while no tensor of this rank shows it
                torch.empty_like(sent)
        return Done()

    def lanes(self, device: torch.device) -> Lanes:
        over_replicas = _PaperLane(self, "replicas") if self._replicas > 1 else None
        self._lanes = self._lanes or Lanes(
            _PaperLane(self, "fetch"), _PaperLane(self, "backup"), over_replicas
        )
        return self._lanes

    def issued(self, lane: Kind) -> int:
        """Writes down the transfer that was asked for last. Returns its number."""
        self._count += 1
        self.tell(Issued(self._count, lane, self._moving))
        self._moving = 0
        return self._count

    def place_for(self, policy: ShardingPolicy, device: torch.device) -> OnPaper | None:
        """As on the planned device."""
        where, on_gpu = rests_in(policy), self.lands_at_once
        away = where == "disk" or (where == "cpu" and on_gpu)
        return OnPaper(self._resting, in_files=where == "disk", far=on_gpu) if away else None

    def check_place(self, policy: ShardingPolicy, device: torch.device) -> None:
        return None  # the directory may be on another machine

    def room_on_disk(self, directory: str, nbytes: int) -> AbstractContextManager[object]:
        return nullcontext()

    # -- what ranks tell each other

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        return None

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        return Done()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return None

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        return [payload] * self.world_size

    def exchange_later(self, payload: bytes, device: torch.device) -> Told:
        return _Said(
            [payload] * self.world_size,
            torch.empty(self.world_size * len(payload), dtype=torch.uint8, device=device),
        )

    def duplicate(self) -> Communicator:
        return self

    def same_ranks(self, other: Communicator) -> bool:
        return self is other


class SharingRanks(AbsentRanks):
    """Each `parts` of them, one after another, hold parts of the same sequences."""

    def __init__(
        self, world_size: int, *, pieces: bool, rank: int, replicas: int, parts: int
    ) -> None:
        super().__init__(world_size, pieces=pieces, rank=rank, replicas=replicas)
        group = AbsentRanks(parts, pieces=False, rank=rank % parts)
        group._count = _OF_OTHERS
        group.observed_by(lambda event: self.tell(event))  # whoever observes the ranks then
        self.sequence_group = group


class _Said:
    """What all ranks said, if all said the same. Holds the memory that it would come to."""

    def __init__(self, payloads: list[bytes], room: Tensor) -> None:
        self._payloads, self._room = payloads, room

    def ready(self) -> bool:
        return True

    def read(self) -> list[bytes]:
        return self._payloads


class _Adding:
    """A reduction that adds up, in the host's memory, when it is waited for."""

    def __init__(
        self, ranks: AbsentRanks, shard: Tensor, own: Sequence[Tensor], among: int
    ) -> None:
        self._ranks, self._shard, self._among = ranks, shard, among
        self._own: Sequence[Tensor] | None = own

    def wait(self) -> None:
        if self._own is not None:
            with self._ranks.making():
                self._shard.new_empty(self._among - 1, self._shard.numel())
        self._own = None


class _PaperLane:
    """A lane without a stream, whose order of events is that of the planned device."""

    def __init__(self, ranks: AbsentRanks, kind: Kind) -> None:
        self._ranks, self._kind = ranks, kind

    def issue(self) -> AbstractContextManager[object]:
        return nullcontext()

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Pending:
        number = self._ranks.issued(self._kind)
        if self._ranks.lands_at_once and then is not None:
            then()
            then = None
        return HostLane().complete(_PaperMark(self._ranks, number, pending), then)

    def defer(self, begin: Callable[[], Pending]) -> Pending:
        return begin()

    def begin_deferred(self) -> None:
        pass


class _PaperMark:
    """A transfer on its lane, which tells when compute waits for it."""

    def __init__(self, ranks: AbsentRanks, number: int, pending: Pending) -> None:
        self._ranks, self._number, self._pending = ranks, number, pending

    def wait(self) -> None:
        self._ranks.tell(Awaited(self._number))
        self._pending.wait()
