"""Memory through which processes of one host hand each other tensors: no message, and no socket, whose work takes several times as long.

Each process has one anonymous file a process group, which the others map by way of `/proc`. So nothing has a name that
could be left behind, and no limit of /dev/shm counts. The file is as long as could ever be needed, and takes the memory that was
written. A transfer takes the place of one that all have read, so the file stays as large as what was under way at once; `trim`
gives that back, and so does the end of the group, or of the process and all that it forked.

    header     token | closed | places in use | of each place: number, tag, turn, (offset, nbytes) and receipt of each rank
    data       what lies in the places, close together

A sender writes into memory whose last contents all have read, then notes it in a place of the header, under a new number. A
reader finds it by tag and turn (transfers of that tag, counted alike on all ranks), looks at it where it lies, and writes the
number as its receipt. A sender never waits for readers: they may be waiting for it.
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
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor

from .neighbours import TOKEN_BYTES, Exchange, Neighbour, Own, meet

__all__: list[str] = []

_WORD = 8  # bytes; the header consists of them
_CLOSED, _USED, _FIRST = TOKEN_BYTES // _WORD, TOKEN_BYTES // _WORD + 1, TOKEN_BYTES // _WORD + 2
_PLACES = 4096  # so many transfers may be under way
_LONGEST_SLEEP = 1e-3  # seconds, between looks at what has not come yet


class Expected:
    """What another rank puts down for this one in a transfer that has begun. If nobody looks, its place is given back all the same."""

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

    def __init__(self, rank: int, world_size: int, own: Own | None, neighbours: Mapping[int, Neighbour], timeout: timedelta) -> None:
        self.near = frozenset(neighbours)
        self._rank, self._world_size, self._timeout = rank, world_size, timeout.total_seconds()
        self._owner = os.getpid()
        self._words_of_place = 3 + 3 * world_size
        header_bytes = _header_bytes(world_size)
        self._memories = {other: neighbour.memory for other, neighbour in neighbours.items()} | ({rank: own.memory} if own else {})
        self._headers = {other: memoryview(memory)[:header_bytes].cast("q") for other, memory in self._memories.items()}
        self._file_fd = own.file_fd if own else -1
        self._process_fds = {other: neighbour.process_fd for other, neighbour in neighbours.items()}
        self._lying: dict[int, tuple[int, int]] = {}  # of this rank's places that not all have read: where, from and to
        self._begin = self._end = header_bytes  # of the data: what lies between takes memory
        self._last = 0  # number given
        self._turns: Counter[int] = Counter()  # by tag
        self._abandoned: deque[tuple[int, int, int]] = deque()  # sender, tag, turn: to be given back when it is there
        self._putting = threading.Lock()

    @property
    def places(self) -> int:
        """How many this process has used at a time."""
        return self._header(self._rank)[_USED]

    @property
    def nbytes(self) -> int:
        """What its file takes."""
        return self._end - self._begin

    def next_turn(self, tag: int) -> int:
        """Of the transfer that is about to begin. Until it is `begun` it can be begun anew, after an exception."""
        return self._turns[tag] + 1

    def begun(self, tag: int) -> None:
        self._turns[tag] += 1

    def put(self, tag: int, turn: int, outgoing: Mapping[int, Sequence[Tensor]]) -> int:
        """Puts down tensors, 1-D, of one dtype: for every near rank some, side by side, once what several get. Returns their number.

        Raises:
            RuntimeError: there is no memory for them, or no place.
        """
        if not outgoing:
            return 0
        distinct = {id(tensors): tensors for tensors in outgoing.values()}
        nbytes = {key: sum(tensor.nbytes for tensor in tensors) for key, tensors in distinct.items()}
        with self._putting:
            header, memory = self._header(self._rank), self._memories[self._rank]
            place, end = self._room(sum(map(_aligned, nbytes.values())))
            offsets = {}
            for key, tensors in distinct.items():
                if nbytes[key]:
                    torch.cat(list(tensors), out=_tensor_in(memory, end, nbytes[key], tensors[0].dtype))
                offsets[key], end = end, end + _aligned(nbytes[key])
            at = self._at(place)
            header[at + 1], header[at + 2] = tag, turn
            for rank, tensors in outgoing.items():
                header[at + 3 + 2 * rank], header[at + 4 + 2 * rank] = offsets[id(tensors)], nbytes[id(tensors)]
            self._last += 1
            header[at] = self._last  # last: whoever sees it finds the rest
            header[_USED] = max(header[_USED], place + 1)
            return self._last

    def _room(self, nbytes: int) -> tuple[int, int]:
        """A free place, and where `nbytes` can lie: in the smallest gap, so that the file takes little more than what is under way."""
        header = self._header(self._rank)
        self._forget_what_all_have_read()
        place = next(number for number in count() if number not in self._lying)
        if place == _PLACES:
            raise RuntimeError(f"{_PLACES} transfers are under way, and none has been waited for: wait for earlier ones")
        edges = [(self._begin, self._begin), *sorted(self._lying.values()), (self._end, self._end)]
        gaps = [(high - low, low) for (_, low), (high, _) in pairwise(edges)]
        _, start = min((gap for gap in gaps if gap[0] >= nbytes), default=gaps[-1])
        try:  # what is not to be had would end the process when it is written
            if place >= header[_USED]:
                os.posix_fallocate(self._file_fd, self._at(place) * _WORD, self._words_of_place * _WORD)
            if start + nbytes > self._end:
                os.posix_fallocate(self._file_fd, self._end, start + nbytes - self._end)
        except OSError as error:
            raise RuntimeError(f"no memory for {nbytes} bytes for other ranks, beside {self.nbytes}: {error.strerror}") from error
        self._end = max(self._end, start + nbytes)
        self._lying[place] = start, start + nbytes
        return place, start

    def _forget_what_all_have_read(self) -> None:
        header = self._header(self._rank)
        for place in list(self._lying):
            if all(header[self._receipt(place, rank)] == header[self._at(place)] for rank in self.near):
                del self._lying[place]

    def trim(self) -> None:
        """Gives back the memory behind what others have yet to read. Waits for nobody, and may be called at any time.

        This is not done after each transfer: the next one would have to ask for every page anew, in training step for step.
        """
        if not self.near:
            return
        memory = self._memories[self._rank]
        with self._putting:
            self._forget_what_all_have_read()
            first = max((stop for _, stop in self._lying.values()), default=self._begin)
            last, self._end = self._end, first
            first, last = _aligned(first, mmap.PAGESIZE), _aligned(last, mmap.PAGESIZE)
            if first < last:
                with suppress(OSError):  # some sandboxes don't know how: then it is given back with the group
                    memory.madvise(mmap.MADV_REMOVE, first, last - first)

    def expect(self, source: int, tag: int, turn: int) -> Expected:
        """What rank `source` puts down for this one in that transfer."""
        return Expected(self, source, tag, turn)

    def abandon(self, source: int, tag: int, turn: int) -> None:
        """Nobody will look at it. (It may not be there yet; and this may run in the midst of anything.)"""
        self._abandoned.append((source, tag, turn))

    @contextmanager
    def look(self, source: int, tag: int, turn: int, like: Tensor) -> Iterator[Tensor]:
        """See `Expected.look`."""
        header = self._header(source)
        if self._abandoned:
            self._give_back()
        place = self._await(source, lambda: self._find(header, tag, turn))
        at = self._at(place)
        offset, nbytes = header[at + 3 + 2 * self._rank], header[at + 4 + 2 * self._rank]
        if nbytes != like.nbytes:
            raise RuntimeError(f"rank {source} sent {nbytes} bytes, expected {like.nbytes}: the ranks' slices do not match")
        yield _tensor_in(self._memories[source], offset, nbytes, like.dtype) if nbytes else like.new_empty(0)
        self._sign(header, place)

    def _sign(self, header: memoryview, place: int) -> None:
        header[self._receipt(place, self._rank)] = header[self._at(place)]

    def _give_back(self) -> None:
        for _ in range(len(self._abandoned)):
            with suppress(IndexError):  # another thread was quicker
                source, tag, turn = self._abandoned.popleft()
                header = self._header(source)
                if (place := self._find(header, tag, turn)) is not None:
                    self._sign(header, place)
                else:
                    self.abandon(source, tag, turn)

    def await_receipts(self, number: int) -> None:
        """Returns when all have read what was put down under `number`."""
        header = self._header(self._rank)
        for rank in self.near:
            self._await(rank, partial(self._read_by, header, rank, number))

    def close(self) -> None:
        """Whoever waits for this process is told that it has left. A process that was forked from it has no say in this."""
        if self._headers and os.getpid() == self._owner:
            self._headers[self._rank][_CLOSED] = 1
        self._headers, self._memories = {}, {}
        descriptors, self._file_fd, self._process_fds = [self._file_fd, *self._process_fds.values()], -1, {}
        for descriptor in descriptors:
            if descriptor >= 0:
                os.close(descriptor)

    def _header(self, rank: int) -> memoryview:
        if rank not in self._headers:
            raise RuntimeError("the process group was destroyed while a transfer was under way")
        return self._headers[rank]

    def _find(self, header: memoryview, tag: int, turn: int) -> int | None:
        """Its place, if it is there and this rank has not read it."""
        for place in range(header[_USED]):
            at = self._at(place)
            if header[at] != header[self._receipt(place, self._rank)] and header[at + 1] == tag and header[at + 2] == turn:
                return place
        return None

    def _read_by(self, header: memoryview, rank: int, number: int) -> int | None:
        places = [place for place in range(header[_USED]) if header[self._at(place)] == number]  # none: something else lies there by now
        return number if all(header[self._receipt(place, rank)] == number for place in places) else None

    def _at(self, place: int) -> int:
        return _FIRST + place * self._words_of_place

    def _receipt(self, place: int, rank: int) -> int:
        return self._at(place) + 3 + 2 * self._world_size + rank

    def _await(self, rank: int, look: Callable[[], int | None]) -> int:
        """What `look` finds that another rank is to do."""
        begin = time.monotonic()
        while (found := look()) is None:
            waited = time.monotonic() - begin
            if waited > self._timeout:
                raise RuntimeError(f"Timed out waiting {self._timeout:g} s for rank {rank}")
            gone = self._header(rank)[_CLOSED] or (waited > _LONGEST_SLEEP and _has_ended(self._process_fds[rank]))
            if gone and look() is None:  # it may have done it last thing
                raise RuntimeError(f"the process of rank {rank} has ended, or has left the process group")
            time.sleep(min(waited / 4, _LONGEST_SLEEP))
        return found


def host_memory(group: Any, rank: int, world_size: int, timeout: timedelta, exchange: Exchange) -> HostMemory:
    """That of this process in `group`: made together with the other ranks at its first use, there until the group is destroyed."""
    if (known := _known(group)) is not None:
        return known
    memory = HostMemory(rank, world_size, *meet(rank, world_size, _header_bytes(world_size), exchange), timeout)
    weakref.finalize(group, memory.close)
    return memory


def _known(group: Any) -> HostMemory | None:
    """Torch's groups take no attributes, and a table of them here would outlive them: what closes a memory knows it."""
    for reference in weakref.getweakrefs(group):
        ending = reference.__callback__
        found = ending.peek() if isinstance(ending, weakref.finalize) else None
        if found is not None and isinstance(owner := getattr(found[1], "__self__", None), HostMemory):
            return owner
    return None


def _header_bytes(world_size: int) -> int:
    return _aligned((_FIRST + _PLACES * (3 + 3 * world_size)) * _WORD, mmap.PAGESIZE)


def _has_ended(process_fd: int) -> bool:
    poll = select.poll()
    poll.register(process_fd, select.POLLIN)
    return any(events & select.POLLIN for _, events in poll.poll(0))


def _aligned(nbytes: int, boundary: int = 64) -> int:
    return -(-nbytes // boundary) * boundary


def _tensor_in(memory: mmap.mmap, offset: int, nbytes: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize, offset=offset)
