"""The collectives that a model needs, as a protocol, and their implementation for a single rank."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .log import History, Told
from .streams import Done, Lanes, Pending, lanes_for

__all__: list[str] = []

Bounds = tuple[int, ...] | None


class Communicator(Protocol):
    """The collectives of the ranks that share a model. Users pass a process group; tests may pass
    their own object.

    The slices of a full buffer `[W*S]` are equal, `[S]` each, unless `bounds` (of a `ChunkLayout`)
    gives other cuts. On a mesh (see `mesh`) slices are those of one replica, and everything else is
    among all ranks.
    """

    rank: int  # among all ranks
    world_size: int  # the number of all ranks
    shard_rank: int  # which slice is this rank's
    shards: int  # W, the number of slices: fewer than ranks if there are replicas
    # which replica of the slices this rank belongs to; replica 0 speaks where all hold the same
    replica: int
    channel: int  # the number of the layer that uses this communicator; messages carry it as a tag
    takes_pieces: bool  # whether `reduce_pieces` works; then gradients need no flat buffer
    # whether messages carry that tag, so that no rank takes one layer's data for another layer's
    tags_messages: bool

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        """[fetch 3] Gathers every rank's `shard` `[S]`, in rank order, into `full` `[W*S]`. `shard`
        may be its own slice of `full`.
        """
        ...

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        """[backup 2] Sums `full` `[W*S]` over ranks, and writes this rank's slice into `shard`
        `[S]`. `full` may be overwritten.
        """
        ...

    def reduce_pieces(self, shard: Tensor, pieces: Sequence[Sequence[Tensor]]) -> Pending:
        """Does the same as `reduce_scatter`, without a flat buffer: `pieces[r]` are 1-D tensors
        that together make rank r's slice.

        The pieces are not changed.
        """
        ...

    def all_to_all(
        self, received: Tensor, sent: Tensor, bounds: Bounds = None, into: Bounds = None
    ) -> Pending:
        """Sends slice r of `sent` to each rank r. `received` takes what all ranks have sent to this
        one, in rank order: slices that are equal, or those of `into`.
        """
        ...

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None: ...

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        """Sends `slices[r]` of rank 0 to the `shard` of each rank r. Each slice is as long as its
        shard.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Copies rank `source`'s values to every rank."""
        ...

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        """Returns every rank's `payload`, in rank order. All payloads have the same length. Blocks
        the host.
        """
        ...

    def exchange_later(self, payload: bytes, device: torch.device) -> Told:
        """Works as `exchange`, but only starts it. The host waits when the result is read."""
        ...

    def duplicate(self) -> Communicator:
        """A second communicator for the same ranks, whose collectives do not queue behind the
        collectives of this one.
        """
        ...

    def lanes(self, device: torch.device) -> Lanes: ...

    def same_ranks(self, other: Communicator) -> bool: ...


class Averages(Communicator, Protocol):
    """One whose transfers may divide for the mean, without a kernel more. Whether they do is its to
    say: a communicator need not have any of this.
    """

    # whether means have the bits of sums that are divided afterwards, but for what underflows
    averages: bool

    def reduce_to_mean(self, shard: Tensor, full: Tensor) -> Pending:
        """Does the same as `reduce_scatter` of equal slices, for the mean over the ranks that it
        sums over.
        """
        ...


def averages(communicator: Communicator) -> bool:
    return bool(getattr(communicator, "averages", False))


def history_of(communicator: Communicator) -> History:
    """Where a model's transfers are noted: with those of all models over these ranks, if messages
    carry no tag.
    """
    if communicator.tags_messages:
        return History()
    return getattr(communicator, "history", None) or History()


def is_first(communicator: Communicator) -> bool:
    """Whether this rank is the one, among all, whose values count, and that writes or logs what is
    needed once.
    """
    return communicator.rank == 0


class SoloCommunicator:
    """One rank, alone or in a process group of its own. The chunk is the full buffer, so nothing is
    transferred.
    """

    rank = shard_rank = replica = 0
    world_size = shards = 1
    channel = 0
    takes_pieces = False
    tags_messages = True

    def __init__(self, group: object = None) -> None:
        # for torch's own tools
        self.group: Callable[[], object] = (lambda: None) if group is None else weakref.ref(group)

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return Done()

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        shard.copy_(full)
        return Done()

    def reduce_pieces(self, shard: Tensor, pieces: Sequence[Sequence[Tensor]]) -> Pending:
        torch.cat(list(pieces[0]), out=shard)
        return Done()

    def all_to_all(
        self, received: Tensor, sent: Tensor, bounds: Bounds = None, into: Bounds = None
    ) -> Pending:
        received.copy_(sent)
        return Done()

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        return None

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        if slices is not None:
            shard.copy_(slices[0])
        return Done()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return None

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        return [payload]

    def exchange_later(self, payload: bytes, device: torch.device) -> Told:
        raise NotImplementedError("one rank has nobody to compare with")

    def duplicate(self) -> Communicator:
        return self

    def lanes(self, device: torch.device) -> Lanes:
        return lanes_for(device)

    def same_ranks(self, other: Communicator) -> bool:
        return isinstance(other, SoloCommunicator)
