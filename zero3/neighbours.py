"""Which ranks share a host, and a look into each other's files there. Linux on x86-64, whose processors keep writes in order."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import struct
from collections.abc import Callable
from typing import NamedTuple

__all__: list[str] = []

SWITCH = "ZERO3_HOST_MEMORY"  # 0: processes of one host speak through their group's sockets, as those of several do
TOKEN_BYTES = 16  # at a file's start, by which the others know it
_INTRODUCTION = struct.Struct(f"<?36sQqq{TOKEN_BYTES}s")  # takes part, host, network, process, descriptor, token

Exchange = Callable[[bytes], list[bytes]]  # every rank's bytes, of one length, in rank order


class Neighbour(NamedTuple):
    """A process of this host: descriptors of its file, and of itself (readable when it has ended)."""

    file: int
    process: int

    def close(self) -> None:
        os.close(self.file)
        os.close(self.process)


def meet(rank: int, world_size: int, exchange: Exchange) -> tuple[int, dict[int, Neighbour]]:
    """This process's new file, and the ranks that see it as it sees theirs. Without any, the file is -1. All ranks call it at once.

    Where some ranks have more neighbours than others nobody has any: torch's debug mode wants as many messages of each.
    """
    token = secrets.token_bytes(TOKEN_BYTES)
    own = _new_file(token)
    host, network = (_boot(), _network()) if own is not None else (b"", 0)
    introductions = exchange(_INTRODUCTION.pack(own is not None, host, network, os.getpid(), own or 0, token))
    neighbours: dict[int, Neighbour] = {}
    for other, introduction in enumerate(introductions):
        also, their_host, their_network, process, file, their_token = _INTRODUCTION.unpack(introduction)
        if other == rank or own is None or not also or (their_host, their_network) != (host, network):
            continue
        if (neighbour := _visit(process, file, their_token)) is not None:
            neighbours[other] = neighbour
    sees = exchange(bytes(other in neighbours for other in range(world_size)))
    near = [{other for other in range(world_size) if sees[one][other] and sees[other][one]} for one in range(world_size)]
    even = len({len(others) for others in near}) == 1
    for other in [other for other in neighbours if not even or other not in near[rank]]:
        neighbours.pop(other).close()
    if own is not None and not neighbours:
        os.close(own)
    return own if own is not None and neighbours else -1, neighbours


def _new_file(token: bytes) -> int | None:
    """None where there is no such thing."""
    if os.environ.get(SWITCH, "1") == "0" or platform.machine() not in ("x86_64", "AMD64") or not hasattr(os, "pidfd_open"):
        return None
    try:
        file = os.memfd_create("zero3", os.MFD_CLOEXEC)
    except OSError:
        return None
    os.pwrite(file, token, 0)
    return file


def _visit(process: int, file: int, token: bytes) -> Neighbour | None:
    """None if another process's file is not to be had, or the numbers mean something else here (as in another container)."""
    with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
        handle = os.pidfd_open(process)
        opened.callback(os.close, handle)
        theirs = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        opened.callback(os.close, theirs)
        if os.pread(theirs, TOKEN_BYTES, 0) == token:
            opened.pop_all()
            return Neighbour(theirs, handle)
    return None


def _boot() -> bytes:
    """Of the host, another after each of its starts."""
    with open("/proc/sys/kernel/random/boot_id", "rb") as file:
        return file.read(36)


def _network() -> int:
    """Processes that share a host, but not its network, were set apart on purpose."""
    return os.stat("/proc/thread-self/ns/net").st_ino
