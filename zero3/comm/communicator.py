"""What a model asks of the ranks that share it, and the answer of one rank that is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from .streams import Done, Lanes, Pending, lanes_for

__all__: list[str] = []

Bounds = tuple[int, ...] | None


class Told(Protocol):
    """What all ranks say, on its way."""

    def ready(self) -> bool:
        """Whether `read` would not make the host wait."""
        ...

    def read(self) -> list[bytes]:
        """Every rank's payload, in rank order."""
        ...


class Communicator(Protocol):
    """What a model needs of the ranks that share it. A test passes its own; users pass a process group.

    Slices of a full buffer are equal, `[S]` of `[W*S]`, but where `bounds` (a layout's) say otherwise.
    """

    rank: int
    world_size: int
    channel: int  # the layer whose communicator this is: where messages have tags, they can't reach another layer
    takes_pieces: bool  # whether `reduce_pieces` is there, so that gradients need no buffer
    tags_messages: bool  # a message carries its layer's tag: ranks that came apart can't take one layer's for another's

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        """[fetch 3] Every rank's `shard` `[S]`, in rank order, into `full` `[W*S]`; a shard may lie in its own place there."""
        ...

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        """[backup 2] This rank's slice of the sum of every rank's `full` `[W*S]`, into `shard` `[S]`; `full` may be overwritten."""
        ...

    def reduce_pieces(self, shard: Tensor, pieces: Sequence[Sequence[Tensor]]) -> Pending:
        """As `reduce_scatter` of a buffer that is not there: of every rank's slice the pieces, 1-D, side by side. They are only read."""
        ...

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None: ...

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        """Rank 0's `slices`, one to every rank's `shard`, of its length; they may lie anywhere."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Rank `source`'s values to every rank."""
        ...

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        """Every rank's `payload`, of one length on all ranks, in rank order. Blocks the host."""
        ...

    def exchange_later(self, payload: bytes, device: torch.device) -> Told:
        """As `exchange`, but nobody waits before the answer is read."""
        ...

    def duplicate(self) -> Communicator:
        """A second communicator of the same ranks, whose collectives do not queue behind this one's."""
        ...

    def lanes(self, device: torch.device) -> Lanes: ...

    def same_ranks(self, other: Communicator) -> bool: ...


class SoloCommunicator:
    """One rank, no process group. The chunk is the full buffer, so nothing is ever moved."""

    rank = 0
    world_size = 1
    channel = 0
    takes_pieces = False
    tags_messages = True

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
