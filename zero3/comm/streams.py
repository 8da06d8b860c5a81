"""The order of work on a device: a compute stream, a fetch lane and a backup lane. The host's lanes
have no streams, only an order.

All memory is allocated and freed on the compute stream. A lane waits for the compute stream before
it begins a transfer, and the compute stream waits for a mark before it uses the result. So the
allocator may reuse a freed buffer at once, without `record_stream`: the next writer of the buffer
always waits for its last reader.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

__all__: list[str] = []


class Pending(Protocol):
    """A transfer under way. After `wait` the host may use its result. (With streams `wait` does
    nothing: they keep the order.)
    """

    def wait(self) -> object: ...


class Done:
    """A transfer that is over."""

    def wait(self) -> None:
        return None


class Then:
    """A transfer, and work that follows it, if there is any: of the lane, or of the host in the
    order of waits, which is the same on all ranks.
    """

    def __init__(self, pending: Pending, then: Callable[[], object] | None = None) -> None:
        self._pending: Pending | None = pending
        self._then = then

    def wait(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        if self._then is not None:
            self._then()
        # only now: after a failure, a second wait must fail again
        self._pending = self._then = None


class Lane(Protocol):
    """A queue of transfers beside the computation."""

    def issue(self) -> AbstractContextManager[object]:
        """Context in which the lane's work is started. That work waits for all work that the
        compute stream has so far.
        """
        ...

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Pending:
        """Runs `then` after `pending`, in the lane's order. Returns the end of both, which compute
        can wait for.
        """
        ...

    def defer(self, begin: Callable[[], Pending]) -> Pending:
        """Begins a transfer of this lane that follows one of another lane: `begin` does it. Returns
        its end.

        On the host it begins at the next `begin_deferred`, or when a deferred transfer is waited
        for: ranks learn the end of the other lane's transfer at different moments, and have to
        begin the transfers of all their groups in one order.
        """
        ...

    def begin_deferred(self) -> None:
        """Begins all deferred transfers."""
        ...


class Lanes(NamedTuple):
    fetch: Lane
    backup: Lane
    replicas: Lane | None = None  # where chunks have replicas: sums over these

    def end_before(self, owner: object) -> None:
        """When `owner` is deleted, the compute stream waits for the lanes first: after an
        exception, transfers may be under way.

        `owner` owns the buffers of all transfers. Their memory is the compute stream's again as
        soon as they are deleted. (A lane that wraps another one has it as `inner`.)
        """
        inner = (getattr(lane, "inner", lane) for lane in self)
        if lanes := [lane for lane in inner if isinstance(lane, StreamLane)]:
            weakref.finalize(owner, _join, lanes).atexit = False


class _Deferred:
    """The end of a transfer that begins later."""

    def __init__(self, lane: HostLane, begin: Callable[[], Pending]) -> None:
        self._lane, self._begin = lane, begin
        self._mark: Pending | None = None

    def begin(self) -> Pending:
        self._mark = self._begin()
        return self._mark

    def wait(self) -> None:
        self._lane.begin_deferred()
        (self._mark or self.begin()).wait()


class HostLane:
    """A lane without a stream. Transfers run in the communicator's threads, and waiting for their
    handles keeps the order.
    """

    def __init__(self) -> None:
        self._open = nullcontext()  # made once, because every transfer enters it
        self._deferred: deque[_Deferred] = deque()

    def issue(self) -> AbstractContextManager[object]:
        return self._open

    complete = staticmethod(Then)

    def defer(self, begin: Callable[[], Pending]) -> Pending:
        self._deferred.append(_Deferred(self, begin))
        return self._deferred[-1]

    def begin_deferred(self) -> None:
        while self._deferred:
            self._deferred.popleft().begin()


def has_streams(device: torch.device) -> bool:
    """Whether work on `device` is ordered by streams: CUDA, and any accelerator that torch knows
    and that has streams.
    """
    accelerator = torch.accelerator.current_accelerator()
    # Apple's has one stream only
    return accelerator is not None and device.type == accelerator.type and device.type != "mps"


class _StreamMark:
    def __init__(self, event: torch.Event, device: torch.device) -> None:
        self._event = event
        self._device = device  # it may differ from the process's current device

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)


class StreamLane:
    """A stream for transfers. The waits [1] and [2] order the lane and the compute stream."""

    def __init__(self, device: torch.device) -> None:
        # High priority, because the computation waits for transfers, and they take little of the
        # device's time.
        self._stream = torch.Stream(device, priority=-1)
        # what the lane has waited for last: the compute stream, or another lane
        self._before = torch.accelerator.current_stream(device)

    def issue(self) -> AbstractContextManager[object]:
        self._before = torch.accelerator.current_stream(self._stream.device)
        self._stream.wait_stream(self._before)  # [1] lane after compute
        return self._stream

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Pending:
        # This runs inside issue(). NCCL's transfer is already in the stream; a transfer with a
        # handle blocks the host here.
        pending.wait()
        if then is not None:
            then()
        event = torch.Event(self._stream.device)
        event.record(self._stream)
        return _StreamMark(event, self._stream.device)  # [2] compute after lane

    def defer(self, begin: Callable[[], Pending]) -> Pending:
        return begin()  # at once: streams keep the order

    def begin_deferred(self) -> None:
        pass

    def join(self) -> None:
        """Makes the stream that the lane has waited for wait for all that the lane has so far."""
        self._before.wait_stream(self._stream)


def _join(lanes: list[StreamLane]) -> None:
    with suppress(RuntimeError):  # on a device that is broken nothing is in order any more
        for lane in reversed(lanes):  # sums over replicas follow reductions
            lane.join()


def lanes_for(device: torch.device) -> Lanes:
    """The lanes of a model that computes on `device`."""
    if has_streams(device):
        return Lanes(StreamLane(device), StreamLane(device))
    return Lanes(HostLane(), HostLane())


def random_state_kept(device: torch.device) -> AbstractContextManager[object]:
    """Context after which torch's random generators, of the host and of `device`, are as they were
    before.
    """
    devices = [device] if has_streams(device) else []
    return torch.random.fork_rng(devices=devices, device_type=device.type if devices else "cpu")


Fence = torch.Event  # a point in a stream's work, which the host can wait for


def fence(device: torch.device) -> Fence:
    """Where the current stream's work is now."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return event


def on_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values on `device`. If they are the host's, the current stream copies them, from pinned
    memory: the host does not wait.
    """
    if values.device.type == "cpu" and has_streams(device):
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)


class OnHost:
    """A copy of a tensor in host memory: in `into`, pinned, or in new memory. The current stream
    makes it, the host does not wait.
    """

    def __init__(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        later = has_streams(tensor.device)
        if into is None:
            into = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=later)
        self._copy = into.copy_(tensor, non_blocking=True)
        self._made: Fence | None = None
        if later:
            self._made = fence(tensor.device)

    def ready(self) -> bool:
        return self._made is None or self._made.query()

    def tensor(self) -> torch.Tensor:
        """Returns the copy. Blocks the host until it is made."""
        if self._made is not None:
            self._made.synchronize()
        return self._copy


class DeviceMemory:
    """What a device's allocator has given out to this process, in bytes. It counts that anyway."""

    keeps_peak = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> int:
        return torch.accelerator.memory_allocated(self._device)

    def peak(self) -> int:
        """The most since `forget_peak`."""
        return torch.accelerator.max_memory_allocated(self._device)

    def forget_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self._device)


def give_cache_back(device: torch.device) -> None:
    """Gives memory that the allocator of `device` has, and nobody uses, to others on the device."""
    if has_streams(device):
        torch.accelerator.empty_cache()


class Clock(Protocol):
    """Measures the time of work on the current stream. The host does not wait for the work."""

    # whether `now` inside `Lane.issue` is a moment of the lane, so that the end of a transfer is
    # known
    on_lanes: bool

    def now(self) -> object:
        """A mark of the current moment in the stream's work. `seconds` tells its time later."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """The time between two moments. Blocks the host until the work has passed both."""
        ...


class HostClock:
    on_lanes = False

    def now(self) -> float:
        return perf_counter()

    def seconds(self, first: float, second: float) -> float:
        return second - first


class StreamClock:
    on_lanes = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, first: torch.Event, second: torch.Event) -> float:
        first.synchronize()
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


def clock_for(device: torch.device) -> Clock:
    return StreamClock(device) if has_streams(device) else HostClock()
