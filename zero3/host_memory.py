"""Memory through which processes of one host hand each other tensors: two copies, where sockets of that host cost about ten.

Each process has one anonymous file (`memfd_create`) a process group, which the others open by way of `/proc`. So nothing
has a name that could be left behind, no limit of /dev/shm counts, and whatever way a process ends, its memory is freed.

    sender      writes a tensor into a place of its own file that all readers are done with; tells the reader where it lies
    reader      reads it from there, and writes into the place's receipt that it has
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import struct
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

__all__: list[str] = []

SWITCH = "ZERO3_HOST_MEMORY"  # 0: everything goes through the process group
_PLACE = 1 << 40  # bytes from one place to the next: the file is sparse, and takes the memory that was written
_TOKEN_BYTES = 16  # at the file's start, by which a reader knows it
_RECEIPTS = 64  # from this byte on: of each place, and each rank, the number of what it has read last
_RECEIPT = struct.Struct("<q")
_INTRODUCTION = struct.Struct(f"<?36sQqq{_TOKEN_BYTES}s")  # takes part, host, network, process, descriptor, token

Exchange = Callable[[bytes], list[bytes]]  # every rank's bytes, of one length, in rank order


class Parcel(NamedTuple):
    """What a sender tells a reader: `nbytes` from `offset` on, the `number`th that it has put down."""

    number: int
    offset: int
    nbytes: int


class HostMemory:
    """One process's end: its own file, and those of the ranks `near` it, which are on its host and see its file as it sees theirs."""

    def __init__(self, rank: int, world_size: int, own: int, theirs: Mapping[int, int]) -> None:
        self.near = frozenset(theirs)
        self._rank = rank
        self._world_size = world_size
        self._own = own
        self._theirs = dict(theirs)
        self._numbers = count(1)
        self._put_down: list[int] = []  # what lies, or has lain, in each place
        self.known: _Known | None = None  # keeps what leads from the group to this
        weakref.finalize(self, _close, [own, *theirs.values()])

    def put(self, outgoing: Mapping[int, Sequence[Tensor]]) -> dict[int, Parcel]:
        """Copies of tensors, contiguous, for every near rank (or none at all) some, side by side. What several get is copied once."""
        if not outgoing:
            return {}
        place, number = self._free_place(), next(self._numbers)
        parcels: dict[int, Parcel] = {}
        copied: dict[int, Parcel] = {}
        offset = (place + 1) * _PLACE
        for rank, tensors in outgoing.items():
            if id(tensors) not in copied:
                start = offset
                for tensor in tensors:
                    _all_of(os.pwrite, self._own, tensor, offset)
                    offset += tensor.nbytes
                copied[id(tensors)] = Parcel(number, start, offset - start)
            parcels[rank] = copied[id(tensors)]
        self._put_down[place] = number
        return parcels

    def take(self, source: int, parcel: Parcel, into: Tensor) -> None:
        """What rank `source` has put down for this one.

        Raises:
            RuntimeError: it is not as long as `into`, or is not there.
        """
        if parcel.nbytes != into.nbytes:
            raise RuntimeError(f"rank {source} sent {parcel.nbytes} bytes, expected {into.nbytes}: ranks move different layers")
        file = self._theirs[source]
        _all_of(lambda descriptor, memory, offset: os.preadv(descriptor, [memory], offset), file, into, parcel.offset)
        place = parcel.offset // _PLACE - 1
        os.pwrite(file, _RECEIPT.pack(parcel.number), self._receipt(place, self._rank))

    def _free_place(self) -> int:
        """The first that all have read, or a new one: there are no more than were once under way together."""
        nbytes = len(self._put_down) * self._world_size * _RECEIPT.size
        read = array("q", os.pread(self._own, nbytes, _RECEIPTS).ljust(nbytes, b"\0"))
        for place, number in enumerate(self._put_down):
            first = place * self._world_size
            if all(read[first + rank] == number for rank in self.near):
                return place
        self._put_down.append(0)
        return len(self._put_down) - 1

    def _receipt(self, place: int, rank: int) -> int:
        return _RECEIPTS + (place * self._world_size + rank) * _RECEIPT.size


def host_memory(group: Any, rank: int, world_size: int, exchange: Exchange) -> HostMemory:
    """That of this process in `group`: made with the other ranks when it is first asked for, then the same for all who ask."""
    for reference in weakref.getweakrefs(group):  # torch's groups take no attributes, and are whose memory it is
        if isinstance(reference, _Known) and (known := reference.memory()) is not None:
            return known
    memory = _meet(rank, world_size, exchange)
    memory.known = _Known(group)
    memory.known.memory = weakref.ref(memory)
    return memory


class _Known(weakref.ref):  # type: ignore[type-arg]
    """A group's memory, for whoever has the group. It is there as long as somebody uses the memory."""

    memory: weakref.ref[HostMemory]


def _meet(rank: int, world_size: int, exchange: Exchange) -> HostMemory:
    """Every rank tries to open every other's file; two are near each other if both could."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    own = _new_file(token)
    willing = own is not None and os.environ.get(SWITCH, "1") != "0"
    here = (_boot(), _network()) if willing else (b"", 0)
    introductions = exchange(_INTRODUCTION.pack(willing, *here, os.getpid(), own if own is not None else -1, token))
    theirs: dict[int, int] = {}
    for other, introduction in enumerate(introductions):
        also, *there, process, descriptor, secret = _INTRODUCTION.unpack(introduction)
        if other != rank and willing and also and tuple(there) == here and (file := _open(process, descriptor, secret)) is not None:
            theirs[other] = file
    seen = exchange(bytes(other in theirs for other in range(world_size)))
    for other in [other for other in theirs if not seen[other][rank]]:
        os.close(theirs.pop(other))
    if own is None:
        own = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    return HostMemory(rank, world_size, own, theirs)


def _new_file(token: bytes) -> int | None:
    try:
        file = os.memfd_create("zero3", os.MFD_CLOEXEC)
    except (AttributeError, OSError):  # not Linux, or forbidden
        return None
    os.pwrite(file, token, 0)
    return file


def _open(process: int, descriptor: int, token: bytes) -> int | None:
    """Another process's file. None if it is not to be had, or the number is another's (as in another container)."""
    try:
        file = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        if os.pread(file, _TOKEN_BYTES, 0) == token:
            return file
    os.close(file)
    return None


def _boot() -> bytes:
    """Of the host, another after each of its starts."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read(36)


def _network() -> int:
    """Processes that share a host, but not its network, were set apart on purpose."""
    return os.stat("/proc/thread-self/ns/net").st_ino


def _all_of(transfer: Callable[[int, memoryview, int], int], file: int, tensor: Tensor, offset: int) -> None:
    """The kernel moves at most 2 GiB at a time."""
    memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")
    done = 0
    while done < len(memory):
        moved = transfer(file, memory[done:], offset + done)
        if not moved:
            raise RuntimeError(f"{len(memory) - done} bytes of {len(memory)} are missing in the host's memory")
        done += moved


def _close(files: list[int]) -> None:
    for file in files:
        os.close(file)
