"""Divides parameters among the ranks that update them, and sends the updated elements to all ranks.

Parameters lie side by side in buckets. Each bucket is cut into W equal runs, one for each rank. A rank's *parts* are the elements of
each parameter in its runs. A large parameter is a bucket by itself, and is gathered in its own memory, without a copy.
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

LARGE_BYTES = 2**18  # a parameter of this size has a bucket by itself: two copies would cost more than one more message
UNDER_WAY = 8  # transfers at once at most, because each takes memory
PIECE_BYTES = 2**20  # of this rank's slice are in one transfer, if ranks share memory: larger transfers are cut
PIECES_BYTES = 2**21  # of such pieces are under way at once, so that the shared memory stays small, and in the processor's cache
STAGED_BYTES = 2**22  # small parameters are sent together, in a buffer of at most this size
VIEWED_BYTES = 25 * 2**20  # in a bucket that parameters become views of, unless a single parameter is larger


@dataclass(eq=False, slots=True)
class Entry:
    """One parameter of the caller."""

    parameter: Tensor
    group: int
    name: str
    owner: int | None = None  # the rank that updates all of it, in its own shape; None: every rank updates a part
    place: Tensor | None = None  # the bucket's memory for the parameter, if the parameter is a view of a bucket

    @property
    def flat(self) -> Tensor:
        """A 1-D view of its elements in the order of its memory."""
        return flat(self.parameter.detach())


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Elements `[start, stop)` of a parameter. They lie at `offset` in their rank's run."""

    entry: Entry
    start: int
    stop: int
    offset: int = 0

    @property
    def shaped(self) -> bool:
        """Whether the part is the whole parameter in its own shape. Other parts are 1-D."""
        return self.entry.owner is not None or self.entry.parameter.numel() <= 1

    def of(self, parameter: Tensor) -> Tensor:
        """Returns a view of this part of the parameter, or of a tensor that lies in memory as the parameter does."""
        return parameter.detach() if self.shaped else flat(parameter.detach())[self.start : self.stop]


@dataclass(eq=False, slots=True)
class Bucket:
    """Parameters side by side, or ranges of them. Slot i of `layout` holds the elements of `entries[i]` from `starts[i]` on."""

    entries: list[Entry]
    starts: list[int]
    layout: ChunkLayout
    large: bool = False  # whether it is one large parameter, or the largest part of one that divides evenly
    memory: Tensor | None = None  # [W*S], if the parameters are views of it

    @property
    def name(self) -> str:
        """The bucket's name in errors."""
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
    """Returns a 1-D view of a gapless tensor's elements, in the order of its memory."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def is_gapless(tensor: Tensor) -> bool:
    """Whether its elements fill its memory, each once, in any order (transposed, channels last)."""
    strides, sizes = tensor.stride(), tensor.size()
    return tensor.permute(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], -sizes[dim]))).is_contiguous()


def laid_out_as(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Returns `tensor` if it lies in memory as `parameter` does, or a copy that does."""
    if tensor.stride() == parameter.stride() or (tensor.is_contiguous() and parameter.is_contiguous()):
        return tensor
    return torch.empty_like(parameter, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def cut(entries: Iterable[Entry], world_size: int, *, apart: bool, viewed: bool) -> list[Bucket]:
    """Makes buckets of the entries that no single rank owns.

    Args:
        entries: The parameters.
        world_size: The number of ranks.
        apart: No bucket holds two parameters, so that each can be updated alone.
        viewed: Parameters become views of their buckets.
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
    """Packs runs into buckets, in order. A bucket with several parameters has at most `limit` bytes."""
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
    """Makes the parameters views of the bucket. Buckets follow one another, so that only one bucket's memory is held twice."""
    first = bucket.entries[0].parameter
    bucket.memory = torch.empty(bucket.layout.padded_numel, dtype=first.dtype, device=first.device)
    bucket.memory[bucket.layout.numel :].zero_()
    for entry, slot in zip(bucket.entries, bucket.layout.slots, strict=True):
        run, parameter = bucket.memory[slot.offset : slot.stop], entry.parameter
        entry.place = run.view_as(parameter) if parameter.is_contiguous() else run.as_strided(parameter.shape, parameter.stride())
        keep_in_place(entry)


def keep_in_place(entry: Entry) -> None:
    """Puts a parameter back into its bucket, with its new values, if other code has replaced its `.data`."""
    if entry.place is not None and entry.place.data_ptr() != entry.parameter.data_ptr():
        entry.place.copy_(entry.parameter.detach())
        entry.parameter.data = entry.place


class Exchange:
    """Sends each rank's updated parts to all ranks."""

    def __init__(self, communicators: dict[torch.device, Communicator]) -> None:
        self._communicators = communicators
        self._pending: deque[tuple[int, Pending]] = deque()  # the bytes that this rank sends, and the transfer

    def start(self, buckets: Sequence[Bucket]) -> None:
        """All-gathers the buckets. Those without copies may still be under way when this returns; `finish` waits for them."""
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
        """Waits for the gathers that `start` began, and gives back their shared memory until the next step."""
        while self._pending:
            self._pending.popleft()[1].wait()
        for communicator in self._communicators.values():
            give_memory_back(communicator)

    def drop(self) -> None:
        """Forgets the gathers under way, after an exception."""
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
        """Sends each parameter that one rank owns from there to the other ranks."""
        for entry in entries:
            parameter, communicator = entry.parameter.detach(), self._communicators[entry.parameter.device]
            if entry.owner is not None and parameter.numel() and communicator.world_size > 1:
                gapless = is_gapless(parameter)
                values = flat(parameter) if gapless else parameter.contiguous()
                with named(communicator, "broadcasting", f"{entry.name} of ZeroRedundancyOptimizer, which rank {entry.owner} has updated,"):
                    communicator.broadcast(values, source=entry.owner)
                if not gapless:
                    parameter.copy_(values)


def named(communicator: Communicator, doing: str, what: str, caller: str = "") -> NamingFailures:
    """Context whose errors tell the rank and the purpose of a transfer that fails inside."""
    return NamingFailures(communicator, doing, Subject(what), caller)


class _Named:
    """A transfer whose error tells the rank and the purpose."""

    def __init__(self, pending: Pending, naming: NamingFailures) -> None:
        self._pending, self._naming = pending, naming

    def wait(self) -> None:
        with self._naming:
            self._pending.wait()


def _along(buckets: Sequence[Bucket], rank: int, place: int = 0) -> Iterator[tuple[int, Part]]:
    """Yields each part of `rank` with its place in a buffer that holds the rank's runs side by side, from `place` on."""
    for bucket in buckets:
        for part in bucket.parts(rank):
            yield place + part.offset, part
        place += bucket.layout.shard_numel
