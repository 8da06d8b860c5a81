"""A GPU without a GPU: streams that only keep vector clocks, and a checker that sees every access to every storage.

torch's streams and events are replaced by fakes, so that the real `StreamLane` runs. Every operation of torch
executes at once on the CPU, but is noted as work of the stream that is current. Two accesses to a storage, one of
them a write, must be ordered by events; memory given back must have been left by every stream but the one that
allocates, because that stream may hand it out again at once.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero3.comm.streams import Done, Lanes, StreamLane

Clock = dict[str, int]


class FakeStream:
    """A queue of work: its clock says how far into every queue's work it is ordered after."""

    def __init__(self, device: object, name: str, current: FakeDevice | None = None) -> None:
        self.device, self.name, self._current = device, name, current
        self.clock: Clock = {name: 0}

    def __enter__(self) -> None:
        assert self._current is not None
        self._entered = self._current.on(self)
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    def wait_stream(self, other: FakeStream) -> None:
        self.join(other.clock)

    def wait_event(self, event: FakeEvent) -> None:
        self.join(event.clock)

    def join(self, clock: Clock) -> None:
        for name, time in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), time)

    def tick(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]


class FakeEvent:
    def __init__(self, device: object = None, enable_timing: bool = False) -> None:
        self.clock: Clock = {}

    def record(self, stream: FakeStream) -> None:
        self.clock = dict(stream.clock)


@dataclass
class _Access:
    """The last write of a storage and the reads since, each as (stream, time, operation)."""

    reference: StorageWeakRef
    born_on: str
    write: tuple[str, int, str] | None = None
    reads: list[tuple[str, int, str]] = field(default_factory=list)


class FakeDevice(TorchDispatchMode):
    """The current stream, and what each stream did to each storage. `races` is what a run must leave empty."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.current = FakeStream("fake", "compute")
        self.races: list[str] = []
        self.allocations_on_lanes: list[str] = []
        self._accesses: dict[int, _Access] = {}
        self._names = (f"{lane}{number}" for number in itertools.count() for lane in ("fetch", "backup"))

    def new_stream(self, device: object, priority: int = 0) -> FakeStream:
        return FakeStream(device, next(self._names), self)

    @contextlib.contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.notice_freed()
        schema, kwargs = func._schema, kwargs or {}
        written, read = [], []
        for number, argument in enumerate(schema.arguments):
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(tensors)
        before = {self._key(tensor) for tensor in [*read, *written]}
        result = func(*args, **kwargs)
        aliases = [returned.alias_info for returned in schema.returns]
        only_a_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        if not only_a_view:
            for tensor in read:
                self._read(tensor, func.__name__)
            for tensor in written:
                self._write(tensor, func.__name__)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and self._key(tensor) not in before and self._key(tensor) not in self._accesses:
                if self.current is not self.compute:
                    self.allocations_on_lanes.append(f"{func.__name__} of {tuple(tensor.shape)} on {self.current.name}")
                self._write(tensor, func.__name__)
        return result

    def freed(self, key: int) -> None:
        access = self._accesses.pop(key, None)
        for stream, time, operation in [] if access is None else [*access.reads, *([access.write] if access.write else [])]:
            if self.compute.clock.get(stream, 0) < time:
                self.races.append(f"memory given back while {operation} on {stream} may still use it")

    def notice_freed(self) -> None:
        for key in [key for key, access in self._accesses.items() if access.reference.expired()]:
            self.freed(key)

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _access(self, tensor: Tensor) -> _Access:
        return self._accesses.setdefault(self._key(tensor), _Access(StorageWeakRef(tensor.untyped_storage()), self.current.name))

    def _ordered(self, earlier: tuple[str, int, str] | None, operation: str, kind: str) -> None:
        if earlier is not None and self.current.clock.get(earlier[0], 0) < earlier[1]:
            self.races.append(f"{operation} on {self.current.name} {kind} {earlier[2]} on {earlier[0]}")

    def _read(self, tensor: Tensor, operation: str) -> None:
        access = self._access(tensor)
        self._ordered(access.write, operation, "reads without waiting for")
        access.reads.append((self.current.name, self.current.tick(), operation))

    def _write(self, tensor: Tensor, operation: str) -> None:
        access = self._access(tensor)
        self._ordered(access.write, operation, "overwrites without waiting for")
        for reader in access.reads:
            self._ordered(reader, operation, "overwrites what is read by")
        access.write, access.reads = (self.current.name, self.current.tick(), operation), []


class EchoCommunicator:
    """Rank 0 of 2, the other being its echo: what matters here is which buffers are touched, on which stream."""

    rank, world_size = 0, 2
    takes_pieces, tags_messages = False, True

    def __init__(self, calls: list[tuple[EchoCommunicator, str]] | None = None) -> None:
        self.calls = [] if calls is None else calls

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Any = None) -> Done:
        self.calls.append((self, "all_gather"))
        for place in full.view(2, -1):
            if place.data_ptr() != shard.data_ptr():
                place.copy_(shard)
        return Done()

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Any = None) -> Done:
        self.calls.append((self, "reduce_scatter"))
        shard.copy_(full[: shard.numel()]).mul_(2)
        return Done()

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None: ...

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Any = None) -> Done:
        if slices is not None:
            shard.copy_(slices[self.rank])
        return Done()

    def all_reduce_later(self, tensor: Tensor) -> Done:
        self.calls.append((self, "all_reduce_later"))
        tensor.mul_(2)
        return Done()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None: ...

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        return [payload, payload]

    def duplicate(self) -> EchoCommunicator:
        return EchoCommunicator(self.calls)

    def lanes(self, device: torch.device) -> Lanes:
        return Lanes(StreamLane(device), StreamLane(device))

    def same_ranks(self, other: object) -> bool:
        return isinstance(other, EchoCommunicator)


@contextlib.contextmanager
def faking() -> Iterator[FakeDevice]:
    """torch's streams and events, as fakes; and the two places that give memory back without an operation."""
    from zero3.core.full_buffer import FullBuffer

    fake = FakeDevice()
    real_free: Callable[[FullBuffer], None] = FullBuffer.free

    def free(buffer: FullBuffer) -> None:
        fake.freed(buffer.tensor.untyped_storage()._cdata)
        real_free(buffer)

    with pytest.MonkeyPatch.context() as patch, fake:
        patch.setattr(torch, "Stream", fake.new_stream)
        patch.setattr(torch, "Event", FakeEvent)
        patch.setattr(torch.accelerator, "current_stream", lambda device=None: fake.current)
        patch.setattr(FullBuffer, "free", free)
        yield fake


def release_at_once(patch: pytest.MonkeyPatch) -> None:
    """What is under way holds none of its memory."""
    from zero3.core import ticket

    def go(self: ticket.Ticket, lane: Any, start: Any, then: Any, held: object) -> None:
        real(self, lane, start, then, None)

    real = ticket.Ticket.go
    patch.setattr(ticket.Ticket, "go", go)


@pytest.fixture
def fake_device() -> Iterator[FakeDevice]:
    with faking() as fake:
        yield fake
