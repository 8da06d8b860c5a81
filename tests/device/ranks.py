"""Ranks as threads of one process, each with a device of its own and torch.distributed's default group on "nccl"."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from tests.device import simulated

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

BACKEND = "nccl" if simulated.TYPE == "cuda" else "simulated"
_PATIENCE = 360.0  # seconds for threads that hang outside of the device, where nothing sees it
_numbers = itertools.count()


def _new_world() -> SimpleNamespace:
    tables: dict[str, Any] = {name: {} for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")}
    return SimpleNamespace(default_pg=None, group_count=0, pg_coalesce_state={}, comms=[], **tables)


class _Worlds:
    """torch.distributed's record of groups, one for each rank. Autograd has a thread for each device: it is that rank's."""

    def __init__(self) -> None:
        self.__dict__.update(by_thread=threading.local(), by_device={})

    def enter(self, device: int) -> None:
        self.by_thread.world = self.by_device[device] = _new_world()

    def _mine(self) -> Any:
        return getattr(self.by_thread, "world", None) or self.by_device[torch.accelerator.current_device_index()]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mine(), name, value)


@contextmanager
def _one_world_each() -> Iterator[_Worlds]:
    module: Any = dist.distributed_c10d
    before, hook = module._world, sys.excepthook
    module._world = worlds = _Worlds()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    dist.set_debug_level(dist.DebugLevel.OFF)  # DETAIL compares collectives through a gloo group: hosts would wait for each other
    try:
        yield worlds
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        module._world, sys.excepthook = before, hook


@contextmanager
def threads_as_ranks(world_size: int) -> Iterator[Callable[..., AbstractContextManager[None]]]:
    """Inside, threads may be ranks. Yields `joined(rank, device)`, in which a thread is one, with torch.distributed's default group."""
    store = dist.PrefixStore(f"run {next(_numbers)}", dist.HashStore())

    @contextmanager
    def joined(rank: int, device: int, *, current: int | None = None, bind: bool = False) -> Iterator[None]:
        try:
            torch.accelerator.set_device_index(device if current is None else current)
            worlds.enter(device)
            bound = torch.device(simulated.TYPE, device) if bind else None
            timeout = timedelta(seconds=60)
            dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=bound)
            try:
                yield
            finally:
                dist.destroy_process_group()
        finally:
            simulated.C.host_ended()

    simulated.C.set_hosts(world_size)
    with _one_world_each() as worlds:
        yield joined


def run_ranks(
    world_size: int,
    body: Callable[[int], Any],
    *,
    device_of: Callable[[int], int] = lambda rank: rank,
    set_device: bool = True,
    bind: bool = False,
) -> list[Any]:
    """What `body(rank)` returned on each rank, or the first error.

    Args:
        world_size: How many ranks.
        body: What each does. It finds the group of all ranks as torch.distributed's default group.
        device_of: The device on which a rank computes.
        set_device: Whether that is its current device too. If not, device 0 is.
        bind: Whether `init_process_group(device_id=)` binds it.
    """
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size

    def rank_thread(rank: int) -> None:
        try:
            with joined(rank, device_of(rank), current=None if set_device else 0, bind=bind):
                results[rank] = body(rank)
        except BaseException as error:
            errors[rank] = error

    with threads_as_ranks(world_size) as joined:
        threads = [threading.Thread(target=rank_thread, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"ranks {[rank for rank, thread in enumerate(threads) if thread.is_alive()]} hang; errors so far: {errors}")
    failed = {rank: error for rank, error in enumerate(errors) if error is not None}
    if failed:
        simulated.recover()  # what is queued still would stop whoever comes next
        first = next((error for error in failed.values() if simulated.STUCK not in str(error)), next(iter(failed.values())))
        for rank, error in failed.items():
            if error is not first:
                first.add_note(f"rank {rank} raised {error!r}")
        raise first
    return results
