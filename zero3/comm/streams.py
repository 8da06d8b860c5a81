"""The order of work on a device: a compute stream, a fetch lane, a backup lane. On the CPU, lanes do nothing.

Everything is allocated and freed on the compute stream. A lane entered waits for what compute has been given so far,
and compute waits for a mark before it touches what the lane made. So a buffer that compute has freed may be handed
out again at once: whoever writes it next waits for its last reader, and no allocator needs to be told of streams.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import torch

__all__: list[str] = []


class Pending(Protocol):
    """A transfer under way. `wait` returns when the host may rely on it (a no-op where streams keep the order)."""

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
        """Work begun inside waits for all that compute has been given so far."""
        ...

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Mark:
        """Runs `then` after `pending`, in the lane's order; returns the mark that says both are done."""
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
        self._pending = self._then = None  # not before: a transfer that failed must not pass for one that is done


class HostLane:
    """No streams: transfers run in the communicator's threads, and waiting for their handles keeps the order."""

    def __init__(self) -> None:
        self._open = nullcontext()  # entered for every transfer of every step

    def issue(self) -> AbstractContextManager[object]:
        return self._open

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Mark:
        return _HostMark(pending, then)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device  # which need not be the process's current one

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaLane:
    """A CUDA stream of the model's own. [1] and [2] are the two halves of every order between lane and compute."""

    def __init__(self, device: torch.device) -> None:
        # High priority: what computes next waits for transfers, and they are short beside it.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def issue(self) -> AbstractContextManager[object]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # [1] lane after compute
        return torch.cuda.stream(self._stream)

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Mark:
        # Called inside issue(): a stream-ordered pending is already queued, a host-ordered one blocks here.
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
    """A copy in host memory of a small tensor of the current stream, made when that stream comes to it: the host does not wait."""

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
        """Blocks the host until the copy is made."""
        if self._made is not None:
            self._made.synchronize()
        return self._copy


class Clock(Protocol):
    """Takes the time of the work on the current stream, without making the host wait for it."""

    on_lanes: bool  # inside `Lane.issue` it tells the lane's time: when a transfer ends, it knows

    def now(self) -> object:
        """This moment of the current stream's work, to be asked about later."""
        ...

    def seconds(self, first: Any, second: Any) -> float:
        """Between two moments. Blocks the host until both have come."""
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
