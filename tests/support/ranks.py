"""Ranks as threads: a communicator that joins W threads of one process, and a way to run a function on each.

A collective here is late on purpose. What it brings is written when its handle is waited for, and until then its
output holds NaN, so that a wait left out shows up as NaN instead of passing by luck. Ranks compare what they are
doing at every collective; one that does something else is an error on all of them, never a mix-up.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3.comm.mesh import MeshCommunicator
from zero3.comm.streams import Lanes, lanes_for


class Collective(NamedTuple):
    """One line of a rank's log."""

    kind: str
    numel: int  # of the full buffer
    dtype: torch.dtype


class RanksDisagree(RuntimeError):
    pass


@dataclass
class _Round:
    values: dict[int, Any] = field(default_factory=dict)
    left: int = 0


class World:
    """What the threads share: a meeting point per communicator and position in its sequence."""

    def __init__(self, size: int, timeout: float = 60.0) -> None:
        self.size = size
        self.timeout = timeout
        self.failed: BaseException | None = None
        self._condition = threading.Condition()
        self._rounds: dict[tuple[str, int], _Round] = {}

    def meet(self, place: str, number: int, rank: int, what: Any, value: Any) -> list[Any]:
        """Waits for all ranks; returns what each brought, in rank order."""
        with self._condition:
            meeting = self._rounds.setdefault((place, number), _Round())
            meeting.values[rank] = (what, value)
            self._condition.notify_all()
            complete = self._condition.wait_for(lambda: len(meeting.values) == self.size or self.failed, self.timeout)
            if len(meeting.values) < self.size:
                raise RanksDisagree(f"rank {rank} waited for the others at {what} ({'a rank failed' if complete else 'timeout'})")
            meeting.left += 1
            if meeting.left == self.size:
                del self._rounds[place, number]
        kinds = {str(entry[0]) for entry in meeting.values.values()}
        if len(kinds) > 1:
            raise RanksDisagree(f"ranks make different collectives: {sorted(kinds)}")
        return [meeting.values[r][1] for r in range(self.size)]

    def fail(self, error: BaseException) -> None:
        with self._condition:
            self.failed = self.failed or error
            self._condition.notify_all()


class _Late:
    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive: Callable[[], None] | None = arrive

    def wait(self) -> None:
        if self._arrive is not None:
            self._arrive()
            self._arrive = None


@dataclass
class _Told:
    read: Callable[[], list[bytes]]

    def ready(self) -> bool:
        return True


def poison(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.uint8:
        tensor.fill_(255)  # four of them are a NaN


class ThreadCommunicator:
    """The `Communicator` of one thread. `log` holds its collectives; `before` is called ahead of each (faults, delays)."""

    takes_pieces = False
    tags_messages = False

    def __init__(self, world: World, rank: int, place: str = "main") -> None:
        self.world, self.rank, self.world_size = world, rank, world.size
        self.shard_rank, self.shards, self.replica, self.channel = rank, world.size, 0, 0
        self.log: list[Collective] = []
        self.before: Callable[[str], None] = lambda kind: None
        self._place, self._count, self._twins = place, 0, 0
        self._sums: Counter[int] = Counter()  # by channel: sums that were only started
        self.told = 0  # payloads that were sent to be read later

    def _meet(self, kind: str, value: Any, numel: int, dtype: torch.dtype) -> list[Any]:
        self._count += 1
        return self.world.meet(self._place, self._count, self.rank, Collective(kind, numel, dtype), value)

    def _post(self, kind: str, value: Tensor, numel: int) -> Callable[[], list[Any]]:
        """Takes part now, waits for the others later."""
        self.before(kind)
        self.log.append(Collective(kind, numel, value.dtype))
        self._count += 1
        number, collective, sent = self._count, self.log[-1], value.detach().clone()
        with self.world._condition:
            self.world._rounds.setdefault((self._place, number), _Round()).values[self.rank] = (collective, sent)
            self.world._condition.notify_all()
        return lambda: self.world.meet(self._place, number, self.rank, collective, sent)

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Any = None) -> _Late:
        arrive = self._post("all_gather", shard, full.numel())
        poison(full)

        def land() -> None:
            full.copy_(torch.cat(arrive()))

        return _Late(land)

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Any = None) -> _Late:
        arrive = self._post("reduce_scatter", full, full.numel())
        poison(shard)
        poison(full)  # the contract lets it be overwritten

        def land() -> None:
            mine = self._mine(shard, bounds)
            parts = [other[mine] for other in arrive()]
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            shard.copy_(total)

        return _Late(land)

    def all_to_all(self, received: Tensor, sent: Tensor, bounds: Any = None) -> _Late:
        arrive = self._post("all_to_all", sent, sent.numel())
        poison(received)
        mine = self._mine(received[: received.numel() // self.world_size], bounds)
        return _Late(lambda: received.copy_(torch.cat([other[mine] for other in arrive()])))

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        self.log.append(Collective("all_reduce", tensor.numel(), tensor.dtype))
        values = torch.stack(self._meet("all_reduce", tensor.clone(), tensor.numel(), tensor.dtype))
        tensor.copy_(values.amax(0) if maximum else values.sum(0))

    def all_reduce_later(self, tensor: Tensor) -> _Late:
        """Carries its layer's number, as gloo's messages do: a rank that stands in for its layers may start it earlier."""
        self.before("all_reduce_later")
        self.log.append(Collective("all_reduce_later", tensor.numel(), tensor.dtype))
        self._sums[self.channel] += 1
        place, number = f"{self._place} sum {self.channel}", self._sums[self.channel]
        collective, sent = self.log[-1], tensor.detach().clone()
        with self.world._condition:
            self.world._rounds.setdefault((place, number), _Round()).values[self.rank] = (collective, sent)
            self.world._condition.notify_all()
        poison(tensor)
        return _Late(lambda: tensor.copy_(torch.stack(self.world.meet(place, number, self.rank, collective, sent)).sum(0)))

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Any = None) -> _Late:
        numel = bounds[-1] if bounds is not None else shard.numel() * self.world_size
        self.log.append(Collective("scatter", numel, shard.dtype))
        dealt = self._meet("scatter", None if slices is None else [each.clone() for each in slices], numel, shard.dtype)[0]
        poison(shard)
        return _Late(lambda: shard.copy_(dealt[self.rank]))

    def _mine(self, shard: Tensor, bounds: Any) -> slice:
        start = bounds[self.rank] if bounds is not None else self.rank * shard.numel()
        return slice(start, start + shard.numel())

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self.log.append(Collective("broadcast", tensor.numel(), tensor.dtype))
        tensor.copy_(self._meet(f"broadcast from {source}", tensor.clone(), tensor.numel(), tensor.dtype)[source])

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        self.log.append(Collective("exchange", len(payload), torch.uint8))
        return self._meet("exchange", payload, len(payload), torch.uint8)

    def exchange_later(self, payload: bytes, device: torch.device) -> _Told:
        """In a sequence of its own, and not in `log`: ranks that have come apart must not be found by the order of these."""
        self.told += 1
        place, number = f"{self._place} told", self.told
        with self.world._condition:
            self.world._rounds.setdefault((place, number), _Round()).values[self.rank] = (len(payload), payload)
            self.world._condition.notify_all()
        return _Told(lambda: self.world.meet(place, number, self.rank, len(payload), payload))

    def duplicate(self) -> ThreadCommunicator:
        self._twins += 1
        other = type(self)(self.world, self.rank, f"{self._place}'{self._twins}")
        other.log, other.before = self.log, self.before
        return other

    def lanes(self, device: torch.device) -> Lanes:
        return lanes_for(device)

    def same_ranks(self, other: object) -> bool:
        return isinstance(other, ThreadCommunicator) and other.world is self.world


class ThreadPartsCommunicator(ThreadCommunicator):
    """One that sends gradients from where they are, and adds its own only when it is waited for."""

    takes_pieces = True

    def reduce_pieces(self, shard: Tensor, parts: Sequence[Sequence[Tensor]]) -> _Late:
        ends = list(accumulate(sum(piece.numel() for piece in pieces) for pieces in parts))
        arrive = self._post("reduce_scatter", torch.cat([piece for pieces in parts for piece in pieces]), ends[-1])
        poison(shard)
        start, stop = ends[self.rank] - shard.numel(), ends[self.rank]

        def land() -> None:
            others = arrive()
            slices = [other[start:stop] if rank != self.rank else torch.cat(list(parts[rank])) for rank, other in enumerate(others)]
            shard.copy_(sum(slices[1:], slices[0]))

        return _Late(land)


class ThreadMesh(MeshCommunicator):
    """A mesh of threads."""

    @property
    def log(self) -> list[Collective]:
        return self._row.log + self._column.log

    @property
    def row(self) -> ThreadCommunicator:
        return self._row

    @property
    def column(self) -> ThreadCommunicator:
        return self._column


def run_mesh(replicas: int, shards: int, body: Callable[[ThreadMesh], Any], timeout: float = 60.0, *, parts: bool = False) -> list[Any]:
    """Runs `body` on a mesh of threads, rows first; returns what each returned, or raises the first error."""
    rows, columns = [World(shards, timeout) for _ in range(replicas)], [World(replicas, timeout) for _ in range(shards)]
    kind = ThreadPartsCommunicator if parts else ThreadCommunicator

    def mesh(rank: int) -> ThreadMesh:
        replica, shard_rank = divmod(rank, shards)
        return ThreadMesh(kind(rows[replica], shard_rank, f"row {replica}"), kind(columns[shard_rank], replica, f"column {shard_rank}"))

    return _run(replicas * shards, lambda rank: body(mesh(rank)), [*rows, *columns], timeout)


def run_ranks(size: int, body: Callable[[ThreadCommunicator], Any], timeout: float = 60.0, *, parts: bool = False) -> list[Any]:
    """Runs `body` on `size` threads, each with its communicator; returns what each returned, or raises the first error."""
    world = World(size, timeout)
    return _run(size, lambda rank: body((ThreadPartsCommunicator if parts else ThreadCommunicator)(world, rank)), [world], timeout)


def _run(size: int, body: Callable[[int], Any], worlds: list[World], timeout: float) -> list[Any]:
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def thread(rank: int) -> None:
        torch.set_num_threads(1)  # OpenMP counts for each thread; with two, the bits of a matrix product depend on the load
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors[rank] = error
            for world in worlds:
                world.fail(error)

    threads = [threading.Thread(target=thread, args=(rank,), daemon=True) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(timeout + 10)
    if any(each.is_alive() for each in threads):
        raise TimeoutError(f"ranks {[r for r, each in enumerate(threads) if each.is_alive()]} are stuck")
    first = next((error for error in errors if error is not None and not isinstance(error, RanksDisagree)), None)
    first = first or next((error for error in errors if error is not None), None)
    if first is not None:
        raise first
    return results
