"""Memory through which processes of one host hand each other tensors: no message, and no socket, whose work takes several times as long.

Each process has one anonymous file a process group, which the others open by way of `/proc`. So nothing has a name that
could be left behind, no limit of /dev/shm counts, and whatever way a process ends, its memory is freed.

    header     token | closed | places in use | of each place: number, tag, turn, (offset, nbytes) and receipt of each rank
    place 0    tensors, side by side
    place 1    ...

A sender writes into a place that all have read, then notes it in the header, under a new number. A reader finds it by tag
and turn (the how manieth under that tag it is), looks at it where it lies, and writes the number as its receipt.
"""

from __future__ import annotations

import mmap
import os
import select
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .neighbours import TOKEN_BYTES, Exchange, Neighbour, meet

__all__: list[str] = []

_WORD = 8  # bytes; the header consists of them
_CLOSED, _USED, _PLACES = TOKEN_BYTES // _WORD, TOKEN_BYTES // _WORD + 1, TOKEN_BYTES // _WORD + 2
_MOST_PLACES = 64  # a sender that finds none free waits
_PLACE_BYTES = 1 << 40  # from one place to the next: the file is sparse, and takes the memory that was written
_LONGEST_SLEEP = 1e-3  # seconds, between looks at what has not come yet


class Expected:
    """What another rank puts down for this one in a transfer that has begun. If nobody looks, the place is given back all the same."""

    __slots__ = ("_memory", "_seen", "_source", "_tag", "_turn")

    def __init__(self, memory: HostMemory, source: int, tag: int, turn: int) -> None:
        self._memory, self._source, self._tag, self._turn, self._seen = memory, source, tag, turn, False

    @contextmanager
    def look(self, like: Tensor) -> Iterator[Tensor]:
        """1-D, as long as `like`: inside, where it lies. Blocks the host.

        Raises:
            RuntimeError: nothing came within the group's timeout, or can come any more; or it is not as long as `like`.
        """
        with self._memory.look(self._source, self._tag, self._turn, like) as found:
            yield found
        self._seen = True

    def __del__(self) -> None:
        if not self._seen:
            self._memory.abandon(self._source, self._tag, self._turn)


class HostMemory:
    """One process's end: its own file, and those of the ranks `near` it, which are on its host."""

    def __init__(self, rank: int, world_size: int, own: int, neighbours: Mapping[int, Neighbour], timeout: timedelta) -> None:
        self.near = frozenset(neighbours)
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout.total_seconds()
        self._process = os.getpid()
        self._own = own
        self._neighbours = dict(neighbours)
        self._words_of_place = 3 + 3 * world_size
        self._headers = {other: self._map(neighbour.file) for other, neighbour in neighbours.items()}
        if neighbours:
            self._headers[rank] = self._map(own)
        self._places: dict[tuple[int, int], mmap.mmap] = {}  # by rank and number
        self._last = 0  # number given
        self._turns: Counter[tuple[int, int]] = Counter()  # of each sender and tag
        self._abandoned: deque[tuple[int, int, int]] = deque()  # sender, tag, turn: to be given back when it is there
        self._putting = threading.Lock()

    def _map(self, file: int) -> memoryview:
        nbytes = (_PLACES + _MOST_PLACES * self._words_of_place) * _WORD
        os.posix_fallocate(file, 0, nbytes)  # whoever comes first
        return memoryview(mmap.mmap(file, nbytes)).cast("q")

    def put(self, tag: int, outgoing: Mapping[int, Sequence[Tensor]]) -> int:
        """Puts down tensors, 1-D, of one dtype: for every near rank some, side by side, once what several get. Returns their number."""
        if not outgoing:
            return 0
        distinct = {id(tensors): tensors for tensors in outgoing.values()}
        nbytes = {key: sum(tensor.nbytes for tensor in tensors) for key, tensors in distinct.items()}
        with self._putting:
            place, header = self._free_place(), self._headers[self._rank]
            memory = self._memory_of(self._rank, place, sum(map(_aligned, nbytes.values())))
            offsets, end = {}, 0
            for key, tensors in distinct.items():
                if nbytes[key]:
                    torch.cat(list(tensors), out=_tensor_in(memory, end, nbytes[key], tensors[0].dtype))
                offsets[key], end = end, end + _aligned(nbytes[key])
            at = self._at(place)
            header[at + 1], header[at + 2] = tag, self._next_turn(self._rank, tag)
            for rank, tensors in outgoing.items():
                header[at + 3 + 2 * rank], header[at + 4 + 2 * rank] = offsets[id(tensors)], nbytes[id(tensors)]
            self._last += 1
            header[at] = self._last  # last: whoever sees it finds the rest
            header[_USED] = max(header[_USED], place + 1)
            return self._last

    def expect(self, source: int, tag: int) -> Expected:
        """What rank `source` puts down for this one in the transfer that begins now."""
        return Expected(self, source, tag, self._next_turn(source, tag))

    def _next_turn(self, source: int, tag: int) -> int:
        self._turns[source, tag] += 1
        return self._turns[source, tag]

    def abandon(self, source: int, tag: int, turn: int) -> None:
        """Nobody will look at it. (It may not be there yet; and this may run in the midst of anything.)"""
        self._abandoned.append((source, tag, turn))

    @contextmanager
    def look(self, source: int, tag: int, turn: int, like: Tensor) -> Iterator[Tensor]:
        """See `Expected.look`."""
        header = self._headers[source]
        if self._abandoned:
            self._give_back()
        place = self._await(source, lambda: self._find(header, tag, turn))
        at = self._at(place)
        offset, nbytes = header[at + 3 + 2 * self._rank], header[at + 4 + 2 * self._rank]
        if nbytes != like.nbytes:
            raise RuntimeError(f"rank {source} sent {nbytes} bytes, expected {like.nbytes}: ranks move different layers")
        memory = self._memory_of(source, place, offset + nbytes)
        yield _tensor_in(memory, offset, nbytes, like.dtype) if nbytes else like.new_empty(0)
        self._sign(header, place)

    def _sign(self, header: memoryview, place: int) -> None:
        header[self._receipt(place, self._rank)] = header[self._at(place)]

    def _give_back(self) -> None:
        for _ in range(len(self._abandoned)):
            source, tag, turn = self._abandoned.popleft()
            if (place := self._find(self._headers[source], tag, turn)) is not None:
                self._sign(self._headers[source], place)
            else:
                self.abandon(source, tag, turn)

    def await_receipts(self, number: int) -> None:
        """Returns when all have read what was put down under `number`."""
        header = self._headers[self._rank]
        for rank in self.near:
            self._await(rank, partial(self._read_by, header, rank, number))

    def close(self) -> None:
        """Whoever waits for this process is told that it has left. A process that was forked from it has no say in this."""
        if self._headers and os.getpid() == self._process:
            self._headers[self._rank][_CLOSED] = 1

    def _memory_of(self, rank: int, place: int, nbytes: int) -> mmap.mmap:
        """A place of a rank's file, at least so long."""
        memory = self._places.get((rank, place))
        if memory is None or len(memory) < nbytes:
            file = self._own if rank == self._rank else self._neighbours[rank].file
            start, size = (place + 1) * _PLACE_BYTES, _aligned(max(nbytes, 1), mmap.PAGESIZE)
            if rank == self._rank and os.fstat(file).st_size < start + size:
                os.ftruncate(file, start + size)
            memory = self._places[rank, place] = mmap.mmap(file, size, offset=start)
        return memory

    def _find(self, header: memoryview, tag: int, turn: int) -> int | None:
        """Its place, if it is there and this rank has not read it."""
        for place in range(header[_USED]):
            at = self._at(place)
            if header[at] != header[self._receipt(place, self._rank)] and header[at + 1] == tag and header[at + 2] == turn:
                return place
        return None

    def _free_place(self) -> int:
        """The first that all have read, or a new one: there are as many as were once under way together."""
        header = self._headers[self._rank]
        for place in range(header[_USED]):
            if all(header[self._receipt(place, rank)] == header[self._at(place)] for rank in self.near):
                return place
        if header[_USED] < _MOST_PLACES:
            return header[_USED]
        oldest = min(header[self._at(place)] for place in range(_MOST_PLACES))
        self.await_receipts(oldest)
        return self._free_place()

    def _read_by(self, header: memoryview, rank: int, number: int) -> int | None:
        places = [place for place in range(header[_USED]) if header[self._at(place)] == number]  # none: something else lies there by now
        return number if all(header[self._receipt(place, rank)] == number for place in places) else None

    def _at(self, place: int) -> int:
        return _PLACES + place * self._words_of_place

    def _receipt(self, place: int, rank: int) -> int:
        return self._at(place) + 3 + 2 * self._world_size + rank

    def _await(self, rank: int, look: Callable[[], int | None]) -> int:
        """What `look` finds that another rank is to do."""
        begin = time.monotonic()
        while (found := look()) is None:
            waited = time.monotonic() - begin
            if waited > self._timeout:
                raise RuntimeError(f"Timed out waiting {self._timeout:g} s for rank {rank}")
            gone = self._headers[rank][_CLOSED] or (waited > _LONGEST_SLEEP and _is_readable(self._neighbours[rank].process))
            if gone and look() is None:  # it may have done it last thing
                raise RuntimeError(f"the process of rank {rank} has ended, or has left the process group")
            time.sleep(min(waited / 4, _LONGEST_SLEEP))
        return found


def host_memory(group: Any, rank: int, world_size: int, timeout: timedelta, exchange: Exchange) -> HostMemory:
    """That of this process in `group`: made together with the other ranks at its first use, there until the group is destroyed."""
    for reference in weakref.getweakrefs(group):  # torch's groups take no attributes
        ending = reference.__callback__
        known = ending.peek() if isinstance(ending, weakref.finalize) else None
        if known is not None and isinstance(owner := getattr(known[1], "__self__", None), HostMemory):
            return owner
    own, neighbours = meet(rank, world_size, exchange)
    memory = HostMemory(rank, world_size, own, neighbours, timeout)
    weakref.finalize(group, memory.close)
    weakref.finalize(memory, _close, own, neighbours)
    return memory


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _aligned(nbytes: int, boundary: int = 64) -> int:
    return -(-nbytes // boundary) * boundary


def _tensor_in(memory: mmap.mmap, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)


def _close(own: int, neighbours: Mapping[int, Neighbour]) -> None:
    for neighbour in neighbours.values():
        neighbour.close()
    if own >= 0:
        os.close(own)
