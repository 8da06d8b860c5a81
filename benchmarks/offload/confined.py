"""Less memory, and a slower disk, for a process; and what it holds, over time."""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MEMORY, BLOCKS = (Path("/sys/fs/cgroup") / name / "zero3-benchmark" for name in ("memory", "blkio"))


def status(name: str) -> int:
    """Bytes, by a field of the kernel's account of this process."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith(f"{name}:"))


def give_back_at_once() -> None:
    """Large blocks that are freed go back to the kernel. The C library would keep them, and small blocks come to lie in them."""
    threshold = -3  # M_MMAP_THRESHOLD
    ctypes.CDLL(None).mallopt(threshold, 1 << 20)


def allow(more: int) -> None:
    """From now on this process gets `more` bytes than it has: heap, stacks and private mappings. Files that are mapped don't count."""
    limit = status("VmData") + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


class Samples(threading.Thread):
    """What the process holds, some fifty times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.rows: list[tuple[float, int, int]] = []  # seconds, anonymous bytes, bytes of mapped files
        self._begun, self._over = time.perf_counter(), threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.02):
            self.rows.append((time.perf_counter() - self._begun, status("RssAnon"), status("RssFile") + status("RssShmem")))

    def end(self) -> list[tuple[float, int, int]]:
        self._over.set()
        self.join()
        return self.rows


def can_confine() -> bool:
    """Whether control groups (the first version's) may be made here: that needs root."""
    try:
        with confined(1 << 40, 1 << 40, "/"):
            return True
    except OSError:
        return False


@contextmanager
def confined(memory: int, bytes_per_second: int, directory: str) -> Iterator[None]:
    """Makes a control group, for `enter`: `memory` bytes, the kernel's copies of files included, and a disk of so many bytes a second."""
    device = os.stat(directory).st_dev
    try:
        for group in (MEMORY, BLOCKS):
            group.mkdir(exist_ok=True)
        (MEMORY / "memory.limit_in_bytes").write_text(str(memory))
        for way in ("read", "write"):
            text = f"{os.major(device)}:{os.minor(device)} {bytes_per_second}"
            (BLOCKS / f"blkio.throttle.{way}_bps_device").write_text(text)
        yield
    finally:
        for group in (MEMORY, BLOCKS):
            for _ in range(100):
                try:
                    group.rmdir()
                    break
                except OSError:  # its processes are ending
                    time.sleep(0.05)


def enter() -> None:
    """This process is confined from now on."""
    for group in (MEMORY, BLOCKS):
        (group / "cgroup.procs").write_text(str(os.getpid()))


def moved() -> dict[str, int]:
    """Bytes that the confined processes have read from the disk, and written to it."""
    rows = [row.split() for row in (BLOCKS / "blkio.throttle.io_service_bytes").read_text().splitlines()]
    return {way: sum(int(row[2]) for row in rows if len(row) == 3 and row[1] == way) for way in ("Read", "Write")}
