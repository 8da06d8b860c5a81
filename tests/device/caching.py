"""torch's caching allocator of a GPU, by its rules: what it asks of the driver ("reserved") for what tensors ask of it ("allocated").

The rules are those of c10's CUDACachingAllocator, which rounds to 512 bytes, and keeps blocks up to 1 MiB in segments of 2 MiB. Larger ones
below 10 MiB come from segments of 20 MiB, all others from segments of their own, in steps of 2 MiB. A free block belongs to its stream.
The smallest that is large enough is taken and split, and neighbours that are free are joined. With `expandable`, a pool is one segment
that grows at its end (`expandable_segments:True`).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

MIB = 1 << 20
UNIT = 512  # bytes
SMALL = MIB  # the largest block of the small pools
LARGE = 10 * MIB  # from here on, segments are made to measure
SEGMENTS = {True: 2 * MIB, False: 20 * MIB}  # by whether it is a small pool
STEP = 2 * MIB  # of segments that are made to measure


@dataclass(slots=True, eq=False)
class Block:
    size: int
    pool: tuple[int, bool]  # stream, whether small
    asked: int = 0  # of its bytes
    before: Block | None = None
    after: Block | None = None
    free: bool = False
    number: int = 0  # of its place among free blocks of one size
    used_on: set[int] = field(default_factory=set)  # other streams (`record_stream`)


class CachingAllocator:
    """Times are those of a clock: a block that other streams use is free when the host asks for memory after they are done with it."""

    def __init__(self, *, expandable: bool = False) -> None:
        self.allocated = self.reserved = self.active = 0  # bytes; active: allocated, or given back and still in use on another stream
        self.requested = 0  # bytes that were asked for, of those that are allocated: what is left of a block may be too small to divide
        self.peak_allocated = self.peak_reserved = self.peak_active = self.peak_requested = 0
        self.segments = 0  # that were asked of the driver
        self._expandable = expandable
        self._free: dict[tuple[int, bool], list[tuple[int, int, Block]]] = {}
        self._last: dict[tuple[int, bool], Block] = {}  # of an expandable pool, the block at its end
        self._live: dict[int, Block] = {}
        self._leaving: list[tuple[float, Block]] = []
        self._count = 0

    def forget_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved, self.peak_active = self.allocated, self.reserved, self.active
        self.peak_requested = self.requested

    def allocate(self, key: int, nbytes: float, stream: int, now: float) -> None:
        """Memory for a tensor, which `key` names from now on. `now`: the host's time."""
        if self._leaving:
            self._take_back(now)
        size = max(UNIT, -(-int(nbytes) // UNIT) * UNIT)
        pool = stream, size <= SMALL
        block = self._found(pool, size) or (self._grown(pool, size) if self._expandable else self._new(pool, size))
        self._split(block, size)
        self._live[key], block.asked = block, int(nbytes)
        self.allocated += block.size
        self.active += block.size
        self.requested += block.asked
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_active = max(self.peak_active, self.active)
        self.peak_requested = max(self.peak_requested, self.requested)

    def use(self, key: int, stream: int) -> None:
        """`record_stream`."""
        if key in self._live:
            self._live[key].used_on.add(stream)

    def free(self, key: int, done: Callable[[int], float]) -> None:
        """`done`: when a stream will have done what it was asked so far."""
        block = self._live.pop(key, None)
        if block is None:  # it was made before the log began
            return
        self.allocated -= block.size
        self.requested -= block.asked
        if block.used_on:
            self._leaving.append((max(map(done, block.used_on)), block))
            block.used_on = set()
        else:
            self._release(block)

    def _take_back(self, now: float) -> None:
        leaving, self._leaving = self._leaving, []
        for ready, block in leaving:
            if ready <= now:
                self._release(block)
            else:
                self._leaving.append((ready, block))

    def _found(self, pool: tuple[int, bool], size: int) -> Block | None:
        free = self._free.get(pool, [])
        at = bisect.bisect_left(free, (size, -1))
        if at == len(free):
            return None
        block = free.pop(at)[2]
        block.free = False
        return block

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self.segments += 1

    def _new(self, pool: tuple[int, bool], size: int) -> Block:
        nbytes = SEGMENTS[pool[1]] if pool[1] or size < LARGE else -(-size // STEP) * STEP
        self._reserve(nbytes)
        return Block(nbytes, pool)

    def _grown(self, pool: tuple[int, bool], size: int) -> Block:
        last = self._last.get(pool)
        if last is not None and last.free:
            self._forget(last)
        else:
            last = self._last[pool] = Block(0, pool, before=last)
            if last.before is not None:
                last.before.after = last
        unit = SEGMENTS[pool[1]]
        more = -(-(size - last.size) // unit) * unit
        self._reserve(more)
        last.size += more
        return last

    def _split(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < UNIT or (left <= SMALL and not (block.pool[1] or self._expandable)):
            return
        rest = Block(left, block.pool, before=block, after=block.after)
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        if self._last.get(block.pool) is block:
            self._last[block.pool] = rest
        self._put(rest)

    def _release(self, block: Block) -> None:
        self.active -= block.size
        if (before := block.before) is not None and before.free:
            self._forget(before)
            before.size, before.after = before.size + block.size, block.after
            if block.after is not None:
                block.after.before = before
            if self._last.get(block.pool) is block:
                self._last[block.pool] = before
            block = before
        if (after := block.after) is not None and after.free:
            self._forget(after)
            block.size, block.after = block.size + after.size, after.after
            if after.after is not None:
                after.after.before = block
            if self._last.get(block.pool) is after:
                self._last[block.pool] = block
        self._put(block)

    def _put(self, block: Block) -> None:
        self._count += 1
        block.free, block.number = True, self._count
        bisect.insort(self._free.setdefault(block.pool, []), (block.size, block.number, block))

    def _forget(self, block: Block) -> None:
        free = self._free[block.pool]
        free.pop(bisect.bisect_left(free, (block.size, block.number)))
        block.free = False
