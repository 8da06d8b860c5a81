"""A rank's last transfers, in a file that outlives the process: the kernel keeps what was stored in
a mapped file, also after SIGKILL, an abort, or an out-of-memory kill. No torch.

A ring has a header, events, and names. An event is three numbers of eight bytes: when; the number
of transfers so far, what is done, and the direction; the forward. Nothing is written but by stores
into memory, so nobody waits for a disk, and a thread that is stuck in C is no hindrance.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from time import time_ns
from typing import Any, NamedTuple

from .errors import Ranked

__all__: list[str] = []

SWITCH = "ZERO3_RING_DIR"
_WEEK = 7 * 24 * 3600.0  # seconds
FILE = re.compile(r"zero3-[0-9a-f]+-([0-9a-f]{16})-rank(\d+)\.ring")
DIRECTIONS = ("forward", "backward", "step", None)  # None: outside of the model
FORWARD, BACKWARD, STEP, OUTSIDE = range(4)
MARKS = ("computing", "waiting", "outside", "step")  # what moves nothing
SIZE = 1 << 18  # bytes, all of them allocated at once: a store that finds the disk full is a SIGBUS
_MAGIC = b"zero3 ring 1\n\0\0\0"
_HELD, _OVER, _CLOSED = 2, 3, 4  # words: events so far; transfers that are over; nobody writes
_ABOUT, _EVENTS, _CAPACITY, _WIDTH = 64, 4096, 3072, 3
_FIRST = _EVENTS // 8  # word
_LAST = _FIRST + (_CAPACITY - 1) * _WIDTH
_NAMES = _EVENTS + _CAPACITY * _WIDTH * 8
_EVENT = struct.Struct("<QQQ")
_KEPT = 16  # rings of one rank in a directory, beside those of living processes
_LONGEST = 200  # characters of a name


class Begun(NamedTuple):
    """What a rank has begun. What `moves` nothing has the number of the transfer before it."""

    moves: bool
    number: int
    doing: str
    layer: str | None
    identity: int  # of the layer, the same on all ranks
    direction: str | None
    forward: int
    when: int  # nanoseconds since 1970


class Read(NamedTuple):
    """A ring, read from its file. `about`: model, rank, world_size, host, pid, started."""

    about: dict[str, Any]
    events: list[Begun]  # the oldest first
    completed: int | None
    closed: bool  # nobody writes it any more: the model is gone, or the process has ended well


class Ring:
    """Writes one. `direction` is that of the events to come."""

    def __init__(self, where: Path, model: int, rank: int, world_size: int) -> None:
        """
        Raises:
            OSError: There is no place for it. No file is left.
        """
        self._path = where / f"zero3-{model:x}-{time_ns():016x}-rank{rank}.ring"
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, SIZE)
            self._map = mmap.mmap(descriptor, SIZE)
        except OSError:
            self._path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        self._pid = os.getpid()
        about = {
            "model": f"{model:x}", "rank": rank, "world_size": world_size,
            "host": socket.gethostname(), "pid": self._pid, "started": time.time(),
        }  # fmt: skip
        text = json.dumps(about).encode()
        self._map[_ABOUT : _ABOUT + len(text)] = text
        self._map[: len(_MAGIC)] = _MAGIC
        self._words = memoryview(self._map).cast("Q")
        self._codes: dict[tuple[str, str | None, int], int] = {}
        self._end, self._place, self._held, self._over = _NAMES, _FIRST, 0, 0
        self.transfers, self.direction = 0, OUTSIDE
        weakref.finalize(self, _close, self._words, self._pid)  # at the process' end, too

    @property
    def is_ours(self) -> bool:
        """False in a forked child, which leaves its parent's ring alone."""
        return self._pid == os.getpid()

    def code(self, doing: str, layer: str | None = None, identity: int = 0) -> int:
        """What events say is done: a number, and two bits for the direction. Names for which there
        is no room are 0.
        """
        known = (doing, layer, identity)
        if (code := self._codes.get(known)) is None:
            code, name = len(self._codes) + 1 << 2, layer and layer[:_LONGEST]
            line = json.dumps([code >> 2, doing[:_LONGEST], name, identity]).encode() + b"\n"
            if self._end + len(line) > SIZE:
                return 0
            self._map[self._end : self._end + len(line)] = line
            self._codes[known] = code
            self._end += len(line)
        return code

    def turn(self, direction: int) -> None:
        self.direction = direction

    def put(self, code: int, forward: int, moves: int = 1, over: int = 0) -> int:
        """Something begins; a mark `moves` 0. So many transfers are known to be `over`. Returns the
        number of transfers so far. It is done for each transfer, so that it has to be short.
        """
        words, place = self._words, self._place
        self.transfers = number = self.transfers + moves
        words[place] = time_ns()
        words[place + 1] = number << 24 | code | self.direction
        words[place + 2] = forward
        self._place = place + _WIDTH if place < _LAST else _FIRST
        words[_HELD] = self._held = self._held + 1
        if over > self._over:
            words[_OVER] = self._over = over
        return number


def _close(words: memoryview, pid: int) -> None:
    if pid == os.getpid():
        words[_CLOSED] = 1


def directory() -> Path | None:
    """Where rings lie. None: the user wants none."""
    if said := os.environ.get(SWITCH):
        return None if said == "0" else Path(said)
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):  # beside torch's
        if dumps := os.environ.get(name):
            return Path(dumps).absolute().parent
    return Path(tempfile.gettempdir()) / f"zero3-{os.getuid()}"


def new_ring(communicator: Ranked, model: int) -> Ring | None:
    """None: it is one rank, the user wants none, or there is no place, of which rank 0 warns."""
    rank, world_size = communicator.rank, communicator.world_size
    if world_size == 1 or (where := directory()) is None:
        return None
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.environ.get(SWITCH) and where.lstat().st_uid != os.getuid():
            raise PermissionError(f"{where} is another user's")
        _forget_old(where, rank)
        return Ring(where, model, rank, world_size)
    except OSError as error:
        logging.getLogger("zero3").log(
            logging.INFO if rank else logging.WARNING,
            "rank %d can't keep its last transfers in %s, from which `python -m zero3 hang` tells "
            "who is behind: %s. Name another directory by %s (0: none)",
            rank, where, error, SWITCH,
        )  # fmt: skip
        return None


def _forget_old(where: Path, rank: int) -> None:
    named = ((path, FILE.fullmatch(path.name)) for path in where.iterdir())
    mine = sorted((match[1], path) for path, match in named if match and int(match[2]) == rank)
    for _, path in mine[: 1 - _KEPT]:
        with suppress(OSError):  # another user's
            if _is_over(path):
                path.unlink()


def _is_over(path: Path) -> bool:
    """Whether nobody writes it. One from another host may be written there, if it is no week old.

    Raises:
        OSError: It can't be read.
    """
    head, old = _bytes_of(path, _EVENTS), time.time() - path.stat().st_mtime > _WEEK
    try:
        about = _about(head)
        closed: int = struct.unpack_from("<Q", head, 8 * _CLOSED)[0]
    except (ValueError, struct.error):  # damaged
        return path.stat().st_uid == os.getuid()
    alive = is_alive(about)
    return bool(closed) or alive is False or (alive is None and old)


def is_alive(about: dict[str, Any]) -> bool | None:
    """Whether the process is there. None: it was on another host."""
    if about["host"] != socket.gethostname():
        return None
    try:
        os.kill(about["pid"], 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _bytes_of(path: Path, count: int) -> bytes:
    """Its first ones. Links are an error, and a pipe has none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(count)


def _about(head: bytes) -> dict[str, Any]:
    if not head.startswith(_MAGIC):
        raise ValueError("it does not begin as a ring does")
    kinds = {"model": str, "rank": int, "world_size": int, "host": str, "pid": int}
    try:
        found: dict[str, Any] | None = json.loads(head[_ABOUT:_EVENTS].rstrip(b"\0"))
    except RecursionError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("started"), int | float):
        raise ValueError("its header is malformed")
    if any(type(found.get(key)) is not kind for key, kind in kinds.items()):
        raise ValueError("its header is malformed")
    small = 0 < found["pid"] < 1 << 31 and found["world_size"] <= 1 << 20
    if not small or not 0 <= found["rank"] < found["world_size"]:
        raise ValueError("its header is malformed")
    return found


def read(path: Path) -> Read:
    """Reads a ring, also while it is written.

    Raises:
        ValueError: It is no ring, or not a whole one.
        OSError: The file system reports an error.
    """
    raw = _bytes_of(path, SIZE + 1)
    if len(raw) != SIZE:
        raise ValueError(f"it has {len(raw)} bytes where a ring has {SIZE}")
    about = _about(raw)
    held, over, closed = struct.unpack_from("<QQQ", raw, 8 * _HELD)
    names = dict(_names(raw[_NAMES:]))
    events: list[Begun] = []
    before, kept = 0, min(held, _CAPACITY) if held < 1 << 48 else 0
    oldest = (held - kept) % _CAPACITY * _WIDTH * 8 if kept else 0
    ring = raw[_EVENTS:_NAMES]
    for when, packed, forward in islice(_EVENT.iter_unpack(ring[oldest:] + ring[:oldest]), kept):
        number = packed >> 24
        named = names.get(packed >> 2 & (1 << 22) - 1, ("other", None, 0))
        moves = number > before and (events != [] or held <= _CAPACITY)
        events.append(Begun(moves, number, *named, DIRECTIONS[packed & 3], forward, when))
        before = number
    numbers = [each.number for each in events]
    if numbers != sorted(numbers) or (held and not events):
        raise ValueError("its events are not in a row")
    return Read(about, events, over or None, closed != 0)


def _names(raw: bytes) -> Iterator[tuple[int, tuple[str, str | None, int]]]:
    for line in raw.rstrip(b"\0").split(b"\n"):
        with suppress(ValueError, TypeError, OverflowError, RecursionError):
            code, doing, layer, identity = json.loads(line)
            yield int(code), (str(doing), layer and str(layer), int(identity))
