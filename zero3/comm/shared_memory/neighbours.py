"""Finds the ranks that share a host, and maps their files. Only for Linux on x86-64, where other
cores see writes in their order.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

__all__: list[str] = []

# environment variable; 0: processes on one host use their group's sockets
SWITCH = "ZERO3_HOST_MEMORY"
TOKEN_BYTES = 16  # at the start of a file, to recognise it
_FILE_NAME = "zero3"
# takes part, host, network, process, descriptor, token
_INTRODUCTION = struct.Struct(f"<?36sQqq{TOKEN_BYTES}s")

# this rank's bytes -> every rank's bytes, all of one length, in rank order
Exchange = Callable[[bytes], list[bytes]]


class Own(NamedTuple):
    """This process's file, and the host and the network that the process is on."""

    file_fd: int
    memory: mmap.mmap
    host: bytes
    network: int


class Neighbour(NamedTuple):
    """Another process on this host: its file, and a descriptor of the process, which becomes
    readable when the process ends.
    """

    memory: mmap.mmap
    process_fd: int


def meet(
    rank: int, world_size: int, header_bytes: int, exchange: Exchange
) -> tuple[Own | None, dict[int, Neighbour]]:
    """Makes this process's file, and finds its neighbours: two ranks are neighbours if each can map
    the other's file.

    All ranks call this together. A rank without neighbours has no file (None). The file is longer
    than all data that can be under way, because the receivers need memory for the same bytes.

    A process that lacks memory, descriptors or permissions has no neighbours; nothing more is
    requested later, so nothing fails later. If some ranks have more neighbours than others, no rank
    has any: torch's debug mode expects every rank to send the same number of messages.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    own = _new_file(token, header_bytes, world_size)
    mine = (
        (True, own.host, own.network, os.getpid(), own.file_fd)
        if own is not None
        else (False, b"", 0, 0, 0)
    )
    introductions = exchange(_INTRODUCTION.pack(*mine, token))
    neighbours: dict[int, Neighbour] = {}
    for other, introduction in enumerate(introductions):
        also, host, network, process, file, their_token = _INTRODUCTION.unpack(introduction)
        if other == rank or own is None or not also or (host, network) != (own.host, own.network):
            continue
        if (neighbour := _visit(process, file, their_token)) is not None:
            neighbours[other] = neighbour
    sees = exchange(bytes(other in neighbours for other in range(world_size)))
    near = [
        {other for other in range(world_size) if sees[one][other] and sees[other][one]}
        for one in range(world_size)
    ]
    even = len({len(others) for others in near}) == 1
    for other in [other for other in neighbours if not even or other not in near[rank]]:
        os.close(neighbours.pop(other).process_fd)
    if own is not None and not neighbours:
        os.close(own.file_fd)
        own = None
    return own, neighbours


def _new_file(token: bytes, header_bytes: int, world_size: int) -> Own | None:
    """A new sparse file, in which only written pages take memory. None if the system does not
    provide it.
    """
    served = (
        platform.machine() in ("x86_64", "AMD64")
        and hasattr(os, "pidfd_open")
        and hasattr(os, "memfd_create")
    )
    if os.environ.get(SWITCH, "1") == "0" or not served:
        return None
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        file = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC)
        opened.callback(os.close, file)
        os.ftruncate(
            file, header_bytes + 4 * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // world_size
        )
        os.pwrite(file, token, 0)
        own = Own(file, _map(file), _boot(), _network())
        opened.pop_all()
        return own
    return None


def _visit(process: int, file: int, token: bytes) -> Neighbour | None:
    """Maps another process's file. None if this is impossible, or if the ids mean something else
    here (as in another container).
    """
    path = f"/proc/{process}/fd/{file}"
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        handle = os.pidfd_open(process)
        opened.callback(os.close, handle)
        # opening another kind of file, such as a pipe, may block
        if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME}"):
            return None
        theirs = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.pread(theirs, TOKEN_BYTES, 0) != token:
                return None
            neighbour = Neighbour(_map(theirs), handle)
        finally:
            os.close(theirs)
        opened.pop_all()
        return neighbour
    return None


def _map(file: int) -> mmap.mmap:
    """Maps the whole file. The map keeps its own descriptor."""
    memory = mmap.mmap(file, 0)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTDUMP)  # a core dump would read every page
    return memory


def _boot() -> bytes:
    """Identifies the host and its last start."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read(36)


def _network() -> int:
    """Identifies the network namespace: processes on one host with separate networks were separated
    on purpose.
    """
    return os.stat("/proc/thread-self/ns/net").st_ino
