"""The order of work on a device: a compute stream, a fetch lane and a backup lane. On the CPU, lanes do nothing.

All memory is allocated and freed on the compute stream. A lane waits for the compute stream before it begins a transfer, and the
compute stream waits for a mark before it uses the result. So the allocator may reuse a freed buffer at once, without
`record_stream`: the next writer of the buffer always waits for its last reader.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

__all__: list[str] = []


class Pending(Protocol):
    """A transfer under way. After `wait` the host may use its result. (With streams `wait` does nothing: they keep the order.)"""

    def wait(self) -> object: ...


class Done:
    """A transfer that is over."""

    def wait(self) -> None:
        return None


class Mark(Protocol):
    """A point in a lane's work that compute can wait for."""

    def wait(self) -> None: ...


class Lane(Protocol):
    """A queue of transfers beside the computation."""

    def issue(self) -> AbstractContextManager[object]:
        """Context in which the lane's work is started. That work waits for all work that the compute stream has so far."""
        ...

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Mark:
        """Runs `then` after `pending`, in the lane's order. Returns a mark for the end of both."""
        ...


class Lanes(NamedTuple):
    fetch: Lane
    backup: Lane


class _HostMark:
    def __init__(self, pending: Pending, then: Callable[[], None] | None) -> None:
        self._pending: Pending | None = pending
        self._then = then

    def wait(self) -> None:
        if self._pending is None:
            return
        self._pending.wait()
        if self._then is not None:
            self._then()
        self._pending = self._then = None  # only now: after a failure, a second wait must fail again


class HostLane:
    """A lane without a stream. Transfers run in the communicator's threads, and waiting for their handles keeps the order."""

    def __init__(self) -> None:
        self._open = nullcontext()  # made once, because every transfer enters it

    def issue(self) -> AbstractContextManager[object]:
        return self._open

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Mark:
        return _HostMark(pending, then)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device  # it may differ from the process's current device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaLane:
    """A CUDA stream for transfers. The waits [1] and [2] order the lane and the compute stream."""

    def __init__(self, device: torch.device) -> None:
        # High priority, because the computation waits for transfers, and they take little of the device's time.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def issue(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # [1] lane after compute
        return torch.cuda.stream(self._stream)

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Mark:
        # This runs inside issue(). NCCL's transfer is already in the stream; a transfer with a handle blocks the host here.
        pending.wait()
        if then is not None:
            then()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaMark(event, self._stream.device)  # [2] compute after lane


def lanes_for(device: torch.device) -> Lanes:
    """The lanes of a model that computes on `device`."""
    if device.type == "cuda":
        return Lanes(CudaLane(device), CudaLane(device))
    return Lanes(HostLane(), HostLane())


class OnHost:
    """A copy of a small tensor in host memory. The current stream makes it, and the host does not wait."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self._copy.copy_(tensor, non_blocking=True)
        self._made: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._made.record(torch.cuda.current_stream(tensor.device))

    def ready(self) -> bool:
        return self._made is None or bool(self._made.query())  # type: ignore[no-untyped-call]

    def tensor(self) -> torch.Tensor:
        """Returns the copy. Blocks the host until it is made."""
        if self._made is not None:
            self._made.synchronize()
        return self._copy


class Clock(Protocol):
    """Measures the time of work on the current stream. The host does not wait for the work."""

    on_lanes: bool  # whether `now` inside `Lane.issue` is a moment of the lane, so that the end of a transfer is known

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


class CudaClock:
    on_lanes = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        first.synchronize()
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
