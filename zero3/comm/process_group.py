"""A torch process group as a `Communicator`. Its collectives take flat tensors."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

# now, because its default arguments keep the group that there is when it is imported
import torch.distributed.nn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from .board import Board, numbered
from .communicator import Bounds, Communicator
from .kept import keep_with, kept_with
from .log import History, Told
from .streams import Done, Lanes, OnHost, Pending, has_streams, lanes_for, on_device

__all__: list[str] = []


_KNOWN = frozenset(  # dtypes that every backend moves
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)
# backends whose transfers block the host, or have handles, even for tensors of an accelerator
_ON_HOST = ("gloo", "mpi", "ucc")
# those that reduce to a mean; `fake` is torch's, which moves nothing and stands for any
_AVERAGES = ("nccl", "fake")


class GroupCommunicator:
    """The collectives of a process group. Streams order them on an accelerator's own backend
    (NCCL); elsewhere handles do.
    """

    takes_pieces = False
    tags_messages = False

    def __init__(self, group: Any, backend: str, device: torch.device) -> None:
        # Weak, because torch holds the group until it is destroyed: a model must not keep gloo's
        # threads alive after that.
        self._reference = weakref.ref(group)
        self._process = os.getpid()
        self._backend = backend
        self._device = device
        self.rank = self.shard_rank = dist.get_rank(group)
        self.world_size = self.shards = dist.get_world_size(group)
        self.replica = 0
        self.channel = 0
        # whether transfers have handles; otherwise streams order them
        self._handles = not has_streams(device) or backend in _ON_HOST
        # NCCL multiplies by 1/W before it adds: that moves no bit if W is a power of two
        self.averages = backend in _AVERAGES and self.world_size.bit_count() == 1
        # torch 2.13 deprecates the old names; torch 2.11 has only the old names
        self._all_gather: Callable[..., Any] = (
            getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        )
        self._reduce_scatter: Callable[..., Any] = (
            getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        )

    @property
    def _group(self) -> Any:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"process {os.getpid()} was forked from rank {self.rank}, process "
                f"{self._process}, and has no part in its process group: a collective would wait "
                "for ever. Make it in the process that has sharded the model"
            )
        if (group := self._reference()) is None:
            raise RuntimeError(
                "this model's process group was destroyed: train before that, or shard the model "
                "anew"
            )
        return group

    @property
    def history(self) -> History:
        """That of all models over this group."""
        group = self._group
        return kept_with(group, History) or keep_with(group, History())

    def message_board(self) -> Board | None:
        # destroyed, or in a forked child: the transfer's own error says so
        with suppress(RuntimeError, KeyError):
            members = dist.get_process_group_ranks(self._group)
            return board_of(
                f"the group {self._group.group_name!r} of {numbered(members)}", members, self.rank
            )
        return None

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Bounds = None) -> Pending:
        if bounds is None:
            if full.dtype not in _KNOWN:
                full, shard = moved(full), moved(shard)
            return (
                self._all_gather(full, shard, group=self._group, async_op=self._handles) or Done()
            )
        slices = [moved(each) for each in cut(full, bounds)]
        return (
            dist.all_gather(slices, moved(shard), group=self._group, async_op=self._handles)
            or Done()
        )

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Bounds = None) -> Pending:
        # NCCL knows real numbers alone; in its other collectives torch sees to that
        if full.dtype.is_complex:
            twice = tuple(2 * bound for bound in bounds) if bounds is not None else None
            return self.reduce_scatter(
                torch.view_as_real(shard).flatten(), torch.view_as_real(full).flatten(), twice
            )
        if bounds is None:
            return (
                self._reduce_scatter(shard, full, group=self._group, async_op=self._handles)
                or Done()
            )
        return (
            dist.reduce_scatter(shard, cut(full, bounds), group=self._group, async_op=self._handles)
            or Done()
        )

    def reduce_to_mean(self, shard: Tensor, full: Tensor) -> Pending:
        return (
            self._reduce_scatter(
                shard, full, dist.ReduceOp.AVG, group=self._group, async_op=self._handles
            )
            or Done()
        )

    def reduce_pieces(self, shard: Tensor, pieces: Sequence[Sequence[Tensor]]) -> Pending:
        raise NotImplementedError(
            f"{self._backend} reduces a buffer: takes_pieces is {self.takes_pieces}"
        )

    def all_to_all(
        self, received: Tensor, sent: Tensor, bounds: Bounds = None, into: Bounds = None
    ) -> Pending:
        sizes = [stop - start for start, stop in pairwise(bounds)] if bounds is not None else None
        own = [received.numel() // self.world_size] * self.world_size if sizes is not None else None
        own = [stop - start for start, stop in pairwise(into)] if into is not None else own
        return (
            dist.all_to_all_single(
                received, sent, own, sizes, group=self._group, async_op=self._handles
            )
            or Done()
        )

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        # what is about gradients on the host (`offload`) may come from there
        there = on_device(tensor, self._device)
        dist.all_reduce(
            there, op=dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self._group
        )
        if there is not tensor:
            tensor.copy_(there)

    def all_reduce_later(self, tensor: Tensor) -> Pending:
        """Works as `all_reduce` for a sum, but only starts it. The order of the sum depends on the
        backend.
        """
        return dist.all_reduce(tensor, group=self._group, async_op=self._handles) or Done()

    def average_later(self, tensor: Tensor) -> Pending:
        """Does the same for a mean."""
        return (
            dist.all_reduce(tensor, dist.ReduceOp.AVG, group=self._group, async_op=self._handles)
            or Done()
        )

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Bounds = None) -> Pending:
        if bounds is not None:
            self._scatter_padded(shard, slices, bounds)
        elif shard.numel():
            sent = [moved(each) for each in slices] if slices is not None else None
            return (
                dist.scatter(
                    moved(shard), sent, group=self._group, group_src=0, async_op=self._handles
                )
                or Done()
            )
        return Done()

    def _scatter_padded(
        self, shard: Tensor, slices: list[Tensor] | None, bounds: tuple[int, ...]
    ) -> None:
        """Pads the slices to one length, because no backend scatters unequal slices. Only loading
        needs this, not training.
        """
        longest = max(stop - start for start, stop in pairwise(bounds))
        if longest:
            padded = shard.new_empty(longest)
            equal = (
                [torch.cat([piece, piece.new_empty(longest - piece.numel())]) for piece in slices]
                if slices is not None
                else None
            )
            self.scatter(padded, equal).wait()
            shard.copy_(padded[: shard.numel()])

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        dist.broadcast(moved(tensor), group=self._group, group_src=source)

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        mine = on_device(torch.frombuffer(bytearray(payload), dtype=torch.uint8), device)
        all_ranks = torch.empty(self.world_size * len(payload), dtype=torch.uint8, device=device)
        self._all_gather(all_ranks, mine, group=self._group)
        return _split(all_ranks, len(payload))

    def exchange_later(self, payload: bytes, device: torch.device) -> Told:
        mine = on_device(torch.frombuffer(bytearray(payload), dtype=torch.uint8), device)
        all_ranks = torch.empty(self.world_size * len(payload), dtype=torch.uint8, device=device)
        pending = (
            self._all_gather(all_ranks, mine, group=self._group, async_op=self._handles) or Done()
        )
        return Gathered(
            pending, None if self._handles else OnHost(all_ranks), all_ranks, len(payload)
        )

    def duplicate(self) -> Communicator:
        if self._handles:
            return self  # transfers with handles do not queue behind each other
        ranks = dist.get_process_group_ranks(self._group)
        part = len(ranks) < dist.get_world_size()
        if part and dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None:
            raise ValueError(
                f"rank {self.rank}: separate_backup_group=True, and the model's process group has "
                f"{len(ranks)} of {dist.get_world_size()} ranks, but devices are bound, by "
                "init_process_group(device_id=...) or, from torch 2.15 on, by NCCL itself: torch "
                "then makes a group by splitting the communicator of all ranks, and waits for "
                "the ranks that are not in it. Use separate_backup_group=False."
            )
        # pass the timeout, because a new group would take torch's default
        group = dist.new_group(
            ranks,
            timeout_of(self._group, self._device.type),
            backend=self._backend,
            use_local_synchronization=part,
        )
        duplicate = GroupCommunicator(group, self._backend, self._device)
        weakref.finalize(duplicate, _destroy, weakref.ref(group)).atexit = False
        return duplicate

    def lanes(self, device: torch.device) -> Lanes:
        return lanes_for(device)

    def same_ranks(self, other: Communicator) -> bool:
        return isinstance(other, GroupCommunicator) and self._group == other._group


def board_of(what: str, members: Sequence[int], rank: int) -> Board | None:
    """It is in the default group's store, which ranks that were given different groups share.
    Nobody keeps the store alive.
    """
    # there is no default group any more, or one of tests, without a store
    with suppress(RuntimeError, AttributeError):
        return Board(dist.group.WORLD.get_group_store(), what, members, rank)  # type: ignore[union-attr]
    return None


def _destroy(reference: weakref.ref[Any]) -> None:
    """Destroys a duplicate's group when its model is deleted, to free the communicator's
    buffers.
    """
    group = reference()
    if group is not None and dist.is_initialized():
        with suppress(RuntimeError, ValueError):  # the group is destroyed already
            dist.destroy_process_group(group)


@dataclass(eq=False, slots=True)
class Gathered:
    """The result of an exchange."""

    pending: Pending
    copied: OnHost | None  # a copy for the host, where that does not wait for `pending`
    all_ranks: Tensor  # every rank's bytes, when `pending` is over
    length: int

    def ready(self) -> bool:
        return self.copied is None or self.copied.ready()

    def read(self) -> list[bytes]:
        self.pending.wait()
        return _split(self.all_ranks if self.copied is None else self.copied.tensor(), self.length)


def _split(all_ranks: Tensor, length: int) -> list[bytes]:
    everything = bytes(all_ranks.tolist())
    return [everything[i : i + length] for i in range(0, len(everything), length)]


def timeout_of(group: Any, device: str) -> timedelta:
    """The group's timeout on `device`. It is torch's default if the backend does not tell, as in
    some debug modes.
    """
    try:
        backend = group._get_backend(torch.device(device))
        return getattr(backend, "wrapped_pg", backend).options._timeout  # type: ignore[no-any-return]
    except (AttributeError, RuntimeError):
        return default_pg_timeout


def moved(tensor: Tensor) -> Tensor:
    """`tensor`, or its bytes: no backend knows all dtypes, and values that are only moved need
    none.
    """
    return tensor if tensor.dtype in _KNOWN else tensor.view(-1).view(torch.uint8)


def cut(full: Tensor, bounds: tuple[int, ...]) -> list[Tensor]:
    """The slices of `full`, as views, one for each rank."""
    return [full[start:stop] for start, stop in pairwise(bounds)]
