"""A fresh group of processes, gloo between them, for every measurement."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class Place(NamedTuple):
    """A rank's place in a group that is about to be."""

    rank: int
    world_size: int
    rendezvous: str
    network: str

    def join(self) -> None:
        if self.network:
            enter_network(self.network)
        method, patience = f"file://{self.rendezvous}", timedelta(seconds=300)
        dist.init_process_group("gloo", init_method=method, rank=self.rank, world_size=self.world_size, timeout=patience)


Job = tuple[Place | None, Callable[..., Any], tuple[Any, ...]]


class RanksFailed(RuntimeError):
    """At least one rank raised or died; the text is what the first of them said."""


def alone(body: Callable[..., Any], *arguments: Any) -> Any:
    """What `body(*arguments)` returned in a new process, which is in no group."""
    return _run([(None, body, arguments)], 900.0)[0]


def on_ranks(
    world_size: int, body: Callable[..., Any], *arguments: Any, namespaces: Sequence[str] = (), timeout: float = 900.0
) -> list[Any]:
    """What `body(rank, world_size, *arguments)` returned on each of `world_size` new processes.

    `namespaces`: a network namespace for each rank, by name (see `ip netns`).
    """
    with tempfile.TemporaryDirectory() as scratch:
        places = [Place(rank, world_size, f"{scratch}/rendezvous", namespaces[rank] if namespaces else "") for rank in range(world_size)]
        return _run([(place, body, (place.rank, world_size, *arguments)) for place in places], timeout)


def _run(jobs: list[Job], timeout: float) -> list[Any]:
    _CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])  # imported once, by the server of forks
    pipes, processes = [], []
    for job in jobs:
        ours, theirs = _CONTEXT.Pipe()
        processes.append(_CONTEXT.Process(target=_serve, args=(theirs, *job), daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        return _collect(pipes, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout)
        if not ready:
            raise RanksFailed(f"no answer in {timeout:.0f} s")
        for pipe in ready:
            try:
                good, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                good, value = False, "the process died"
            if not good:
                raise RanksFailed(value)
            results[pipes.index(pipe)] = value  # type: ignore[arg-type]
    return [results[rank] for rank in range(len(pipes))]


def _serve(pipe: Connection, place: Place | None, body: Callable[..., Any], arguments: Any) -> None:
    try:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        if place is not None:
            place.join()
        pipe.send((True, body(*arguments)))
        if place is not None:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def enter_network(name: str) -> None:
    """Moves this process to a named network namespace. Its threads to come will be there too."""
    with Path(f"/var/run/netns/{name}").open() as file:
        _check(ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NEW_NETWORK))


def enter_private_network() -> bool:
    """A loopback of our own for this process and those it starts, so that its counters count us alone. Needs root; False without."""
    import fcntl
    import socket
    import struct

    try:
        _check(ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK))
    except OSError:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        up = struct.pack("16sh", b"lo", 0x1 | 0x40)  # IFF_UP | IFF_RUNNING
        fcntl.ioctl(channel, 0x8914, up)  # SIOCSIFFLAGS
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return True


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
