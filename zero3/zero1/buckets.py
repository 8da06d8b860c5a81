"""Which elements of which parameters each rank updates, and how what it updated reaches the others.

Parameters lie side by side in buckets, each cut in W equal runs; a rank's *parts* are what its runs hold of each
parameter. A large parameter is a bucket by itself and gathered in its own memory, without a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from ..comm.factory import give_memory_back, shares_memory
from ..comm.streams import Pending
from ..core.layout import ChunkLayout, Slot

__all__: list[str] = []

LARGE_BYTES = 2**18  # from here on two copies cost more than one more message
UNDER_WAY = 8  # transfers, of parameters that don't: what is on its way takes memory
PIECE_BYTES = 2**20  # large transfers through shared memory are cut into pieces of this rank's slice,
PIECES_BYTES = 2**21  # of which so much is under way: the memory stays small, and in the processor's cache
STAGED_BYTES = 2**22  # small parameters travel together, in no more memory than this
VIEWED_BYTES = 25 * 2**20  # of a bucket that parameters become views of, but for a larger parameter


@dataclass(eq=False, slots=True)
class Entry:
    """One parameter, as the user gave it."""

    parameter: Tensor
    group: int
    name: str
    owner: int | None = None  # the rank that updates all of it, in its own shape; None: every rank a part
    place: Tensor | None = None  # where the parameter's elements are to lie, if it is a view of a bucket

    @property
    def flat(self) -> Tensor:
        """Its elements in the order of its memory, 1-D, sharing it."""
        return flat(self.parameter.detach())


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Elements `[start, stop)` of a parameter, at `offset` of its rank's run."""

    entry: Entry
    start: int
    stop: int
    offset: int = 0

    @property
    def shaped(self) -> bool:
        """In the parameter's own shape, not 1-D: all of it."""
        return self.entry.owner is not None or self.entry.parameter.numel() <= 1

    def of(self, parameter: Tensor) -> Tensor:
        """This part of the parameter, or of a tensor that lies in memory as the parameter does; shares the memory."""
        return parameter.detach() if self.shaped else flat(parameter.detach())[self.start : self.stop]


@dataclass(eq=False, slots=True)
class Bucket:
    """Runs of parameters side by side, `layout`'s slot number i being elements `[starts[i], ...)` of `entries[i]`."""

    entries: list[Entry]
    starts: list[int]
    layout: ChunkLayout
    large: bool = False  # one parameter, or most of it, worth a message of its own
    memory: Tensor | None = None  # [W*S], if the parameters are views of it

    @property
    def name(self) -> str:
        """For errors."""
        names = list(dict.fromkeys(entry.name for entry in self.entries))
        return f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} of ZeroRedundancyOptimizer"

    @property
    def in_place(self) -> bool:
        return self.large or self.memory is not None

    @property
    def full(self) -> Tensor:
        """[W*S], if `in_place`."""
        if self.memory is not None:
            return self.memory
        return self.entries[0].flat[self.starts[0] : self.starts[0] + self.layout.numel]

    def parts(self, rank: int) -> Iterator[Part]:
        for piece in self.layout.pieces(rank):
            number = int(piece.slot.name)
            start = self.starts[number]
            yield Part(self.entries[number], start + piece.start, start + piece.stop, piece.offset)


def flat(tensor: Tensor) -> Tensor:
    """The elements of a tensor without gaps, in the order of its memory, as a 1-D view of it."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def is_gapless(tensor: Tensor) -> bool:
    """Whether its elements fill its memory, each once, in whatever order (transposed, channels last)."""
    strides, sizes = tensor.stride(), tensor.size()
    return tensor.permute(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], -sizes[dim]))).is_contiguous()


def laid_out_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """`tensor`, or a copy of it that lies in memory as `parameter` does."""
    if tensor.stride() == parameter.stride() or (tensor.is_contiguous() and parameter.is_contiguous()):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def cut(entries: Iterable[Entry], world_size: int, *, apart: bool, viewed: bool) -> list[Bucket]:
    """Buckets for the entries that no single rank owns.

    Args:
        apart: no bucket holds two parameters, so that any of them can be updated alone.
        viewed: parameters become views of their buckets.
    """
    kinds: dict[tuple[torch.device, torch.dtype], list[Entry]] = {}
    for entry in entries:
        if entry.owner is None and entry.parameter.numel():
            kinds.setdefault((entry.parameter.device, entry.parameter.dtype), []).append(entry)
    buckets: list[Bucket] = []
    for same in kinds.values():
        if viewed:
            buckets += _packed([(entry, 0, entry.parameter.numel()) for entry in same], world_size, VIEWED_BYTES)
            continue
        small = []
        for entry in same:
            numel, itemsize = entry.parameter.numel(), entry.parameter.element_size()
            even = numel - numel % world_size if numel * itemsize >= LARGE_BYTES else 0
            if even:
                buckets.append(_bucket([(entry, 0, even)], world_size, large=True))
            if even < numel:
                small.append((entry, even, numel))
        buckets += _packed(small, world_size, 0 if apart else STAGED_BYTES)
    if viewed:
        for bucket in buckets:
            _move_into(bucket)
    return buckets


def _packed(runs: Iterable[tuple[Entry, int, int]], world_size: int, limit: int) -> Iterator[Bucket]:
    """In order, each bucket within `limit` bytes if more than one parameter is in it."""
    held: list[tuple[Entry, int, int]] = []
    size = 0
    for run in runs:
        nbytes = (run[2] - run[1]) * run[0].parameter.element_size()
        if held and size + nbytes > limit:
            yield _bucket(held, world_size)
            held, size = [], 0
        held.append(run)
        size += nbytes
    if held:
        yield _bucket(held, world_size)


def _bucket(runs: Sequence[tuple[Entry, int, int]], world_size: int, *, large: bool = False) -> Bucket:
    slots, offset = [], 0
    for number, (_, start, stop) in enumerate(runs):
        slots.append(Slot(str(number), (stop - start,), offset))
        offset += stop - start
    return Bucket([entry for entry, _, _ in runs], [start for _, start, _ in runs], ChunkLayout(tuple(slots), world_size), large)


def _move_into(bucket: Bucket) -> None:
    """One bucket at a time, so that no more than one is held twice."""
    first = bucket.entries[0].parameter
    bucket.memory = torch.empty(bucket.layout.padded_numel, dtype=first.dtype, device=first.device)
    bucket.memory[bucket.layout.numel :].zero_()
    for entry, slot in zip(bucket.entries, bucket.layout.slots, strict=True):
        run, parameter = bucket.memory[slot.offset : slot.stop], entry.parameter
        entry.place = run.view_as(parameter) if parameter.is_contiguous() else run.as_strided(parameter.shape, parameter.stride())
        keep_in_place(entry)


def keep_in_place(entry: Entry) -> None:
    """A parameter that is a view of a bucket, and whose `.data` something has replaced, goes back with its new values."""
    if entry.place is not None and entry.place.data_ptr() != entry.parameter.data_ptr():
        entry.place.copy_(entry.parameter.detach())
        entry.parameter.data = entry.place


class Exchange:
    """Makes every rank's parts all ranks' parameters."""

    def __init__(self, communicators: dict[torch.device, Communicator]) -> None:
        self._communicators = communicators
        self._pending: deque[tuple[int, Pending]] = deque()  # and the bytes that this rank has sent

    def start(self, buckets: Sequence[Bucket]) -> None:
        """An all-gather of each bucket; those that go through copies are over when this returns, the last few others after `finish`."""
        staged: dict[tuple[torch.device, torch.dtype], list[Bucket]] = {}
        for bucket in buckets:
            if bucket.in_place:
                self._gather_in_place(bucket)
            else:
                first = bucket.entries[0].parameter
                staged.setdefault((first.device, first.dtype), []).append(bucket)
        for (device, dtype), same in staged.items():
            self._through_copies(same, device, dtype)

    def finish(self) -> None:
        """Waits for what `start` began, and gives back the memory in which it travelled: until the next step nobody needs it."""
        while self._pending:
            self._pending.popleft()[1].wait()
        for communicator in self._communicators.values():
            give_memory_back(communicator)

    def drop(self) -> None:
        """After an exception: nobody waits for what was begun."""
        self._pending.clear()

    def _gather_in_place(self, bucket: Bucket) -> None:
        communicator, full = self._communicators[bucket.entries[0].parameter.device], bucket.full
        runs = full.view(communicator.world_size, -1)
        in_pieces, length = shares_memory(communicator), PIECE_BYTES // full.element_size()
        naming = named(communicator, "gathering", bucket.name)
        for start in range(0, runs.shape[1], length) if in_pieces else (0,):
            piece = runs[:, start : start + length] if in_pieces else runs
            own = piece[communicator.rank]
            while len(self._pending) == UNDER_WAY or (in_pieces and self._sent + own.nbytes > PIECES_BYTES):
                self._pending.popleft()[1].wait()
            with naming:
                gather = communicator.all_gather(piece if in_pieces else full, own)
            self._pending.append((own.nbytes, _Named(gather, naming)))

    @property
    def _sent(self) -> int:
        return sum(nbytes for nbytes, _ in self._pending)

    def _through_copies(self, buckets: Sequence[Bucket], device: torch.device, dtype: torch.dtype) -> None:
        together: list[Bucket] = []
        for bucket in [*buckets, None]:
            size = sum(held.layout.padded_numel for held in together) * dtype.itemsize
            if together and (bucket is None or size + bucket.layout.padded_numel * dtype.itemsize > STAGED_BYTES):
                self._gather_copies(together, device, dtype)
                together = []
            if bucket is not None:
                together.append(bucket)

    def _gather_copies(self, buckets: Sequence[Bucket], device: torch.device, dtype: torch.dtype) -> None:
        communicator = self._communicators[device]
        length = sum(bucket.layout.shard_numel for bucket in buckets)
        full = torch.empty(communicator.world_size * length, dtype=dtype, device=device)
        run = full[communicator.rank * length : (communicator.rank + 1) * length]
        for place, part in _along(buckets, communicator.rank):
            run[place : place + part.stop - part.start].copy_(part.entry.flat[part.start : part.stop])
        with named(communicator, "gathering", buckets[0].name if len(buckets) == 1 else f"{buckets[0].name}, and what follows,"):
            communicator.all_gather(full, run).wait()
        for rank in range(communicator.world_size):
            if rank != communicator.rank:
                for place, part in _along(buckets, rank, rank * length):
                    part.entry.flat[part.start : part.stop].copy_(full[place : place + part.stop - part.start])

    def broadcast(self, entries: Iterable[Entry]) -> None:
        """Parameters that one rank owns, from it to the others."""
        for entry in entries:
            parameter, communicator = entry.parameter.detach(), self._communicators[entry.parameter.device]
            if entry.owner is not None and parameter.numel() and communicator.world_size > 1:
                gapless = is_gapless(parameter)
                values = flat(parameter) if gapless else parameter.contiguous()
                with named(communicator, "broadcasting", f"{entry.name} of ZeroRedundancyOptimizer, which rank {entry.owner} has updated,"):
                    communicator.broadcast(values, source=entry.owner)
                if not gapless:
                    parameter.copy_(values)


def named(communicator: Communicator, doing: str, what: str) -> NamingFailures:
    """A context: who makes the transfers inside, and what for, if one fails."""
    return NamingFailures(communicator, doing, Subject(what))


class _Named:
    """A transfer whose failure is told by name."""

    def __init__(self, pending: Pending, naming: NamingFailures) -> None:
        self._pending, self._naming = pending, naming

    def wait(self) -> None:
        with self._naming:
            self._pending.wait()


def _along(buckets: Sequence[Bucket], rank: int, place: int = 0) -> Iterator[tuple[int, Part]]:
    """Where each part of `rank` lies when its runs are laid side by side from `place` on."""
    for bucket in buckets:
        for part in bucket.parts(rank):
            yield place + part.offset, part
        place += bucket.layout.shard_numel
