"""Shared memory through which processes on one host exchange tensors. Sockets would take several
times as long.

For each process group, each process has one anonymous file, which the other processes map through
`/proc`. It has no name, so it can't be left behind, and the size of /dev/shm does not limit it. It
is sparse: only written pages take memory. A new transfer reuses memory that all have read. `trim`
frees the memory, and so does the end of the group, or of the process and its forks.

    header     token | closed | places in use | per place: number, tag, turn, (offset, nbytes) and
    receipt for each rank data       the tensors, close together

A place describes one transfer. The sender writes its tensors into free memory, and then a new
number into a place of the header. The receiver finds the place by tag and turn. (The turn counts
the transfers with that tag. It is the same on all ranks.) The receiver reads the tensors where they
are, and writes the number back as its receipt. After all receipts the memory is free again. A
sender never waits for receivers, because they may be waiting for this sender.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor

from ..kept import keep_with, kept_with
from .neighbours import TOKEN_BYTES, Exchange, Neighbour, Own, meet

__all__: list[str] = []

_WORD = 8  # bytes; the header is an array of words
_CLOSED, _USED, _FIRST = TOKEN_BYTES // _WORD, TOKEN_BYTES // _WORD + 1, TOKEN_BYTES // _WORD + 2
_PLACES = 4096  # the most transfers that may be under way
_LONGEST_SLEEP = 1e-3  # seconds between two looks at the header


class Expected:
    """Tensors that rank `source` sends to this rank in one transfer. If this rank never looks at
    them, the place is given back all the same.
    """

    __slots__ = ("memory", "seen", "source", "tag", "turn")

    def __init__(self, memory: HostMemory, source: int, tag: int, turn: int) -> None:
        self.memory, self.source, self.tag, self.turn = memory, source, tag, turn
        self.seen = False

    def __del__(self) -> None:
        if not self.seen:
            self.memory.abandon(self.source, self.tag, self.turn)


class _Outbox:
    """One process's file: its places, with the receipts of the ranks that read it, and the data."""

    __slots__ = ("_receipts", "_words", "header", "memory")

    def __init__(self, memory: mmap.mmap, world_size: int) -> None:
        self.memory = memory
        self._words, self._receipts = _words_of_place(world_size), 3 + 2 * world_size
        self.header = memoryview(memory)[: _header_bytes(world_size)].cast("q")

    def at(self, place: int) -> int:
        return _FIRST + place * self._words

    def receipt(self, place: int, rank: int) -> int:
        return self.at(place) + self._receipts + rank

    def sign(self, place: int, rank: int) -> None:
        self.header[self.receipt(place, rank)] = self.header[self.at(place)]

    def is_signed(self, place: int, rank: int) -> bool:
        return self.header[self.receipt(place, rank)] == self.header[self.at(place)]

    def find(self, tag: int, turn: int, rank: int) -> int | None:
        """The transfer's place. None if it has not come, or if `rank` has read it."""
        header = self.header
        for place in range(header[_USED]):
            at = self.at(place)
            unread = header[at] != header[self.receipt(place, rank)]
            if unread and header[at + 1] == tag and header[at + 2] == turn:
                return place
        return None

    def read_by(self, rank: int, number: int) -> int | None:
        """The number of a transfer that `rank` has read, or None."""
        header = self.header
        # none: read, and already replaced
        places = [place for place in range(header[_USED]) if header[self.at(place)] == number]
        return number if all(self.is_signed(place, rank) for place in places) else None


class HostMemory:
    """One process's side: its own file, and the files of the ranks in `near`, which are on the same
    host.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        own: Own | None,
        neighbours: Mapping[int, Neighbour],
        timeout: timedelta,
    ) -> None:
        self.near = frozenset(neighbours)
        self._rank, self._timeout = rank, timeout.total_seconds()
        self._owner = os.getpid()
        self._outboxes = {
            other: _Outbox(neighbour.memory, world_size) for other, neighbour in neighbours.items()
        }
        if own:
            self._outboxes[rank] = _Outbox(own.memory, world_size)
        self._file_fd = own.file_fd if own else -1
        self._process_fds = {other: neighbour.process_fd for other, neighbour in neighbours.items()}
        # place that lacks a receipt -> begin and end of its data
        self._unread: dict[int, tuple[int, int]] = {}
        # of the data; only this range takes memory
        self._begin = self._end = _header_bytes(world_size)
        self._last = 0  # the last number given to a transfer
        self._turns: Counter[int] = Counter()  # by tag
        # (sender, tag, turn) that this rank will not read
        self._abandoned: deque[tuple[int, int, int]] = deque()
        self._putting = threading.Lock()

    @property
    def places(self) -> int:
        """The most places that this process has used at the same time."""
        return self._outbox(self._rank).header[_USED]

    @property
    def nbytes(self) -> int:
        """The memory that the data in this process's file takes."""
        return self._end - self._begin

    def next_turn(self, tag: int) -> int:
        """The turn of the next transfer. It stays the same until `begun` is called, so a failed
        start can be repeated.
        """
        return self._turns[tag] + 1

    def begun(self, tag: int) -> None:
        self._turns[tag] += 1

    def put(self, tag: int, turn: int, outgoing: Mapping[int, Sequence[Tensor]]) -> int:
        """Writes 1-D tensors of one dtype, side by side for each near rank. A list for several
        ranks is written once. Returns the number.

        Raises:
            RuntimeError: there is no free memory, or no free place.
        """
        if not outgoing:
            return 0
        distinct = {id(tensors): tensors for tensors in outgoing.values()}
        nbytes = {
            key: sum(tensor.nbytes for tensor in tensors) for key, tensors in distinct.items()
        }
        with self._putting:
            outbox = self._outbox(self._rank)
            header, memory = outbox.header, outbox.memory
            place, end = self._room(sum(map(_aligned, nbytes.values())))
            offsets = {}
            for key, tensors in distinct.items():
                if nbytes[key]:
                    torch.cat(
                        list(tensors), out=_tensor_in(memory, end, nbytes[key], tensors[0].dtype)
                    )
                offsets[key], end = end, end + _aligned(nbytes[key])
            at = outbox.at(place)
            header[at + 1], header[at + 2] = tag, turn
            for rank, tensors in outgoing.items():
                header[at + 3 + 2 * rank] = offsets[id(tensors)]
                header[at + 4 + 2 * rank] = nbytes[id(tensors)]
            self._last += 1
            # written last: a reader that sees the number finds everything else
            header[at] = self._last
            header[_USED] = max(header[_USED], place + 1)
            return self._last

    def _room(self, nbytes: int) -> tuple[int, int]:
        """Returns a free place, and an offset with `nbytes` of free memory. The smallest gap is
        taken, so that the file stays small.
        """
        outbox = self._outbox(self._rank)
        self._forget_what_all_have_read()
        place = next(number for number in count() if number not in self._unread)
        if place == _PLACES:
            raise RuntimeError(
                f"{_PLACES} transfers are under way, and none has been waited for: wait for "
                "earlier ones"
            )
        edges = [(self._begin, self._begin), *sorted(self._unread.values()), (self._end, self._end)]
        gaps = [(high - low, low) for (_, low), (high, _) in pairwise(edges)]
        _, start = min((gap for gap in gaps if gap[0] >= nbytes), default=gaps[-1])
        try:  # to write a page that the system can't provide would kill the process
            if place >= outbox.header[_USED]:
                low, high = outbox.at(place), outbox.at(place + 1)
                os.posix_fallocate(self._file_fd, low * _WORD, (high - low) * _WORD)
            if start + nbytes > self._end:
                os.posix_fallocate(self._file_fd, self._end, start + nbytes - self._end)
        except OSError as error:
            raise RuntimeError(
                f"no memory for {nbytes} bytes for other ranks, beside {self.nbytes}: "
                f"{error.strerror}"
            ) from error
        self._end = max(self._end, start + nbytes)
        self._unread[place] = start, start + nbytes
        return place, start

    def _forget_what_all_have_read(self) -> None:
        outbox = self._outbox(self._rank)
        for place in list(self._unread):
            if all(outbox.is_signed(place, rank) for rank in self.near):
                del self._unread[place]

    def trim(self) -> None:
        """Frees the memory behind the data that other ranks have yet to read. It waits for nobody,
        and may be called at any time.

        It is not called after each transfer, because the next transfer would have to allocate every
        page again.
        """
        if not self.near:
            return
        memory = self._outboxes[self._rank].memory
        with self._putting:
            self._forget_what_all_have_read()
            first = max((stop for _, stop in self._unread.values()), default=self._begin)
            last, self._end = self._end, first
            first, last = _aligned(first, mmap.PAGESIZE), _aligned(last, mmap.PAGESIZE)
            if first < last:
                # some sandboxes don't support it: then the memory is freed with the group
                with suppress(OSError):
                    memory.madvise(mmap.MADV_REMOVE, first, last - first)

    def abandon(self, source: int, tag: int, turn: int) -> None:
        """This rank will not read that transfer. It may not have come yet. A destructor calls this,
        so it only takes a note.
        """
        self._abandoned.append((source, tag, turn))

    @contextmanager
    def look(self, expected: Expected, like: Tensor) -> Iterator[Tensor]:
        """Context that yields the received data: 1-D, as long as `like`, in shared memory. Blocks
        the host.

        Raises:
            RuntimeError: nothing came within the group's timeout, the sender has ended, or the data
                is not as long as `like`.
        """
        source, tag, turn = expected.source, expected.tag, expected.turn
        outbox = self._outbox(source)
        if self._abandoned:
            self._give_back()
        place = self._await(source, lambda: outbox.find(tag, turn, self._rank))
        at = outbox.at(place) + 3 + 2 * self._rank
        offset, nbytes = outbox.header[at], outbox.header[at + 1]
        if nbytes != like.nbytes:
            raise RuntimeError(
                f"rank {source} sent {nbytes} bytes, expected {like.nbytes}: the ranks' slices do "
                "not match"
            )
        yield (
            _tensor_in(outbox.memory, offset, nbytes, like.dtype) if nbytes else like.new_empty(0)
        )
        outbox.sign(place, self._rank)
        expected.seen = True

    def _give_back(self) -> None:
        for _ in range(len(self._abandoned)):
            with suppress(IndexError):  # another thread took the last item
                source, tag, turn = self._abandoned.popleft()
                outbox = self._outbox(source)
                if (place := outbox.find(tag, turn, self._rank)) is not None:
                    outbox.sign(place, self._rank)
                else:
                    self.abandon(source, tag, turn)

    def await_receipts(self, number: int) -> None:
        """Returns when all near ranks have read transfer `number`."""
        outbox = self._outbox(self._rank)
        for rank in self.near:
            self._await(rank, partial(outbox.read_by, rank, number))

    def close(self) -> None:
        """Leaves the group: ranks that wait for this process get an error. In a forked child it
        only closes the child's descriptors.
        """
        if self._outboxes and os.getpid() == self._owner:
            self._outboxes[self._rank].header[_CLOSED] = 1
        self._outboxes = {}
        descriptors = [self._file_fd, *self._process_fds.values()]
        self._file_fd = -1
        self._process_fds = {}
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def _outbox(self, rank: int) -> _Outbox:
        if rank not in self._outboxes:
            raise RuntimeError("the process group was destroyed while a transfer was under way")
        return self._outboxes[rank]

    def _await(self, rank: int, look: Callable[[], int | None]) -> int:
        """Calls `look` until it finds what rank `rank` has to write, and returns that."""
        begin = time.monotonic()
        while (found := look()) is None:
            waited = time.monotonic() - begin
            if waited > self._timeout:
                raise RuntimeError(f"Timed out waiting {self._timeout:g} s for rank {rank}")
            gone = self._outbox(rank).header[_CLOSED] or (
                waited > _LONGEST_SLEEP and _has_ended(self._process_fds[rank])
            )
            if gone and look() is None:  # the rank may have written it just before it ended
                raise RuntimeError(
                    f"the process of rank {rank} has ended, or has left the process group"
                )
            time.sleep(min(waited / 4, _LONGEST_SLEEP))
        return found


def host_memory(
    group: Any, rank: int, world_size: int, timeout: timedelta, exchange: Exchange
) -> HostMemory:
    """This process's memory for `group`. All ranks make it together at its first use; it is closed
    when the group is destroyed.
    """
    if (known := kept_with(group, HostMemory)) is not None:
        return known
    memory = HostMemory(
        rank, world_size, *meet(rank, world_size, _header_bytes(world_size), exchange), timeout
    )
    return keep_with(group, memory, HostMemory.close)


def _header_bytes(world_size: int) -> int:
    return _aligned((_FIRST + _PLACES * _words_of_place(world_size)) * _WORD, mmap.PAGESIZE)


def _words_of_place(world_size: int) -> int:
    return 3 + 3 * world_size


def _has_ended(process_fd: int) -> bool:
    poll = select.poll()
    poll.register(process_fd, select.POLLIN)
    return any(events & select.POLLIN for _, events in poll.poll(0))


def _aligned(nbytes: int, boundary: int = 64) -> int:
    return -(-nbytes // boundary) * boundary


def _tensor_in(memory: mmap.mmap, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
