"""Which ranks share a host, and a look into each other's files there. Linux on x86-64, whose processors keep writes in order."""

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

SWITCH = "ZERO3_HOST_MEMORY"  # 0: processes of one host speak through their group's sockets, as those of several do
TOKEN_BYTES = 16  # at a file's start, by which the others know it
_FILE_NAME = "zero3"
_INTRODUCTION = struct.Struct(f"<?36sQqq{TOKEN_BYTES}s")  # takes part, host, network, process, descriptor, token

Exchange = Callable[[bytes], list[bytes]]  # every rank's bytes, of one length, in rank order


class Own(NamedTuple):
    """This process's file, and where it is."""

    file_fd: int
    memory: mmap.mmap
    host: bytes
    network: int


class Neighbour(NamedTuple):
    """Another process of this host: its file, and a descriptor of itself, which is readable when it has ended."""

    memory: mmap.mmap
    process_fd: int


def meet(rank: int, world_size: int, header_bytes: int, exchange: Exchange) -> tuple[Own | None, dict[int, Neighbour]]:
    """This process's new file, and the ranks that see it as it sees theirs; None without any. All ranks call it at once.

    After `header_bytes` there is room for all that can be under way: who reads it has memory for it, `world_size` times over.
    Whatever a process can't have (memory, descriptors, a look at another) makes it one without neighbours: nothing is needed later.
    Where some ranks have more neighbours than others nobody has any: torch's debug mode wants as many messages of each.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    own = _new_file(token, header_bytes, world_size)
    mine = (True, own.host, own.network, os.getpid(), own.file_fd) if own is not None else (False, b"", 0, 0, 0)
    introductions = exchange(_INTRODUCTION.pack(*mine, token))
    neighbours: dict[int, Neighbour] = {}
    for other, introduction in enumerate(introductions):
        also, host, network, process, file, their_token = _INTRODUCTION.unpack(introduction)
        if other == rank or own is None or not also or (host, network) != (own.host, own.network):
            continue
        if (neighbour := _visit(process, file, their_token)) is not None:
            neighbours[other] = neighbour
    sees = exchange(bytes(other in neighbours for other in range(world_size)))
    near = [{other for other in range(world_size) if sees[one][other] and sees[other][one]} for one in range(world_size)]
    even = len({len(others) for others in near}) == 1
    for other in [other for other in neighbours if not even or other not in near[rank]]:
        os.close(neighbours.pop(other).process_fd)
    if own is not None and not neighbours:
        os.close(own.file_fd)
        own = None
    return own, neighbours


def _new_file(token: bytes, header_bytes: int, world_size: int) -> Own | None:
    """None where there is no such thing. The file is sparse: it takes the memory that is written."""
    served = platform.machine() in ("x86_64", "AMD64") and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")
    if os.environ.get(SWITCH, "1") == "0" or not served:
        return None
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        file = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC)
        opened.callback(os.close, file)
        os.ftruncate(file, header_bytes + 4 * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // world_size)
        os.pwrite(file, token, 0)
        own = Own(file, _map(file), _boot(), _network())
        opened.pop_all()
        return own
    return None


def _visit(process: int, file: int, token: bytes) -> Neighbour | None:
    """None if another process's file is not to be had, or the numbers mean something else here (as in another container)."""
    path = f"/proc/{process}/fd/{file}"
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        handle = os.pidfd_open(process)
        opened.callback(os.close, handle)
        if not os.readlink(path).startswith(f"/memfd:{_FILE_NAME}"):  # to open a pipe or a terminal may block, or worse
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
    """All of it. The map keeps a descriptor of its own."""
    memory = mmap.mmap(file, 0)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_DONTDUMP)  # a core dump would look at each of its pages
    return memory


def _boot() -> bytes:
    """Of the host, another after each of its starts."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read(36)


def _network() -> int:
    """Processes that share a host, but not its network, were set apart on purpose."""
    return os.stat("/proc/thread-self/ns/net").st_ino
