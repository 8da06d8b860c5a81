"""Ranks as threads: a communicator that joins W threads of one process, and a way to run a function on each.

A collective here is late on purpose. What it brings is written when its handle is waited for, and until then its
output holds NaN, so that a wait left out shows up as NaN instead of passing by luck. Ranks compare what they are
doing at every collective; one that does something else is an error on all of them, never a mix-up.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import HashStore

from zero3.comm.board import Board
from zero3.comm.mesh import MeshCommunicator
from zero3.comm.streams import Lanes, lanes_for


class Collective(NamedTuple):
    """One line of a rank's log."""

    kind: str
    numel: int  # of the full buffer
    dtype: torch.dtype


class RanksDisagree(RuntimeError):
    pass


class OrdersDiffer(RuntimeError):
    pass


class Order:
    """The orders in which ranks begin the collectives of all their groups. They have to fit together.

    If a transport makes one transfer of a rank after another, ranks whose orders make a circle wait for each other for ever:

        rank 0    row 0, column 0    waits for rank 1
        rank 1    column 1, row 0    waits for rank 3
        rank 2    column 0, row 1    waits for rank 0
        rank 3    row 1, column 1    waits for rank 2
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[int, deque[Hashable]] = defaultdict(deque)  # of each rank: what it has begun and that can't be over yet
        self._begun: dict[Hashable, set[int]] = defaultdict(set)  # the ranks that have begun a collective

    def begin(self, rank: int, collective: Hashable, ranks: int) -> None:
        """`rank` begins a `collective` of so many `ranks`."""
        with self._lock:
            self._queues[rank].append((collective, ranks))
            self._begun[collective, ranks].add(rank)
            while any(self._end(head) for head in {queue[0] for queue in self._queues.values() if queue}):
                pass
            circle = next(filter(None, (self._circle([start]) for start in self._queues)), None)
        if circle is not None:
            waits = "; ".join(f"rank {rank} first makes {self._queues[rank][0]}" for rank in circle)
            raise OrdersDiffer(f"ranks begin the collectives of their groups in different orders: {waits}")

    def _end(self, head: Any) -> bool:
        """Ends a collective if it is the first one on all of its ranks."""
        first = [queue for queue in self._queues.values() if queue and queue[0] == head]
        if len(first) < head[1]:
            return False
        del self._begun[head]
        for queue in first:
            queue.popleft()
        return True

    def _circle(self, path: list[int]) -> list[int] | None:
        """Ranks each of which waits for the next, and the last one for the first."""
        queue = self._queues[path[-1]]
        for other in self._begun[queue[0]] if queue else ():
            if self._queues[other][0] != queue[0]:
                found = path[path.index(other) :] if other in path else self._circle([*path, other])
                if found is not None:
                    return found
        return None


@dataclass
class _Round:
    values: dict[int, Any] = field(default_factory=dict)
    left: int = 0


class World:
    """What the threads of a group share: a meeting point per communicator and position in its sequence."""

    def __init__(self, size: int, timeout: float = 60.0, order: Order | None = None) -> None:
        self.size = size
        self.order = order or Order()
        self.timeout = timeout
        self.failed: BaseException | None = None
        self._condition = threading.Condition()
        self._rounds: dict[tuple[str, int], _Round] = {}
        self.store = HashStore()

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


class ThreadBoard(Board):
    """Threads whose group is wrong find it out at their first collective: it says which one each of them is at."""

    def meeting(self, error: Exception | None = None) -> Any:
        return nullcontext()


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

    def __init__(self, world: World, rank: int, place: str = "main", thread: int | None = None) -> None:
        self.world, self.rank, self.world_size = world, rank, world.size
        self._thread = rank if thread is None else thread  # the rank among all threads
        self.shard_rank, self.shards, self.replica, self.channel = rank, world.size, 0, 0
        self.log: list[Collective] = []
        self.before: Callable[[str], None] = lambda kind: None
        self._place, self._count, self._twins = place, 0, 0
        self.told = 0  # payloads that were sent to be read later

    def _meet(self, kind: str, value: Any, numel: int, dtype: torch.dtype) -> list[Any]:
        return self.world.meet(self._place, self._begin(), self.rank, Collective(kind, numel, dtype), value)

    def _begin(self) -> int:
        """Returns the number of the collective that begins now."""
        self._count += 1
        self.world.order.begin(self._thread, f"collective {self._count} of {self._place}", self.world_size)
        return self._count

    def _post(self, kind: str, value: Tensor, numel: int) -> Callable[[], list[Any]]:
        """Takes part now, waits for the others later."""
        self.before(kind)
        self.log.append(Collective(kind, numel, value.dtype))
        number, collective, sent = self._begin(), self.log[-1], value.detach().clone()
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

    def all_to_all(self, received: Tensor, sent: Tensor, bounds: Any = None, into: Any = None) -> _Late:
        if into is not None:  # ranks send as much as they like to each other
            slices = [sent[start:stop].clone() for start, stop in pairwise(bounds)]
            self.before("all_to_all")
            self.log.append(Collective("all_to_all", 0, sent.dtype))
            everyone = self.world.meet(self._place, self._begin(), self.rank, self.log[-1], slices)
            poison(received)
            return _Late(lambda: received.copy_(torch.cat([other[self.rank] for other in everyone])))
        arrive = self._post("all_to_all", sent, sent.numel())
        poison(received)
        mine = self._mine(received[: received.numel() // self.world_size], bounds)
        return _Late(lambda: received.copy_(torch.cat([other[mine] for other in arrive()])))

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        self.log.append(Collective("all_reduce", tensor.numel(), tensor.dtype))
        values = torch.stack(self._meet("all_reduce", tensor.clone(), tensor.numel(), tensor.dtype))
        tensor.copy_(values.amax(0) if maximum else values.sum(0))

    def all_reduce_later(self, tensor: Tensor) -> _Late:
        """It is over when all ranks wait for it, as gloo's among three ranks, which has a second half."""
        arrive = self._post("all_reduce_later", tensor, tensor.numel())
        number = self._count
        poison(tensor)

        def land() -> None:
            every = arrive()
            self.world.meet(f"{self._place}, second half", number, self.rank, "second half", None)
            tensor.copy_(torch.stack(every).sum(0))

        return _Late(land)

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
        other = type(self)(self.world, self.rank, f"{self._place}'{self._twins}", self._thread)
        other.log, other.before = self.log, self.before
        return other

    def lanes(self, device: torch.device) -> Lanes:
        return lanes_for(device)

    def same_ranks(self, other: object) -> bool:
        return isinstance(other, ThreadCommunicator) and other.world is self.world

    def message_board(self) -> Board:
        return ThreadBoard(self.world.store, "threads", range(self.world_size), self.rank)


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
            own = torch.cat([others[self.rank][:0], *parts[self.rank]])  # a slice may be empty
            slices = [other[start:stop] if rank != self.rank else own for rank, other in enumerate(others)]
            shard.copy_(sum(slices[1:], slices[0]))

        return _Late(land)


class ThreadMesh(MeshCommunicator):
    """A mesh of threads."""

    store: HashStore

    @property
    def log(self) -> list[Collective]:
        return self._row.log + self._column.log

    @property
    def row(self) -> ThreadCommunicator:
        return self._row

    @property
    def column(self) -> ThreadCommunicator:
        return self._column

    def message_board(self) -> Board:
        return ThreadBoard(self.store, "a mesh of threads", range(self.world_size), self.rank)


def run_mesh(
    replicas: int,
    shards: int,
    body: Callable[[ThreadMesh], Any],
    timeout: float = 60.0,
    *,
    parts: bool = False,
    kind: type[ThreadCommunicator] | None = None,
) -> list[Any]:
    """Runs `body` on a mesh of threads, rows first; returns what each returned, or raises the first error."""
    order = Order()
    rows = [World(shards, timeout, order) for _ in range(replicas)]
    columns = [World(replicas, timeout, order) for _ in range(shards)]
    kind = kind or (ThreadPartsCommunicator if parts else ThreadCommunicator)

    def mesh(rank: int) -> ThreadMesh:
        replica, shard_rank = divmod(rank, shards)
        row = kind(rows[replica], shard_rank, f"row {replica}", rank)
        made = ThreadMesh(row, kind(columns[shard_rank], replica, f"column {shard_rank}", rank))
        made.store = rows[0].store
        return made

    return _run(replicas * shards, lambda rank: body(mesh(rank)), [*rows, *columns], timeout)


def run_ranks(
    size: int,
    body: Callable[[ThreadCommunicator], Any],
    timeout: float = 60.0,
    *,
    parts: bool = False,
    kind: type[ThreadCommunicator] | None = None,
) -> list[Any]:
    """Runs `body` on `size` threads, each with its communicator; returns what each returned, or raises the first error."""
    world = World(size, timeout)
    kind = kind or (ThreadPartsCommunicator if parts else ThreadCommunicator)
    return _run(size, lambda rank: body(kind(world, rank)), [world], timeout)


def run_parts(groups: int, parts: int, body: Callable[[Any], Any], timeout: float = 60.0) -> list[Any]:
    """Runs `body` on threads as a mesh `("dp_shard", "sp")`: each group's threads hold parts of the same sequences."""
    world = World(groups * parts, timeout)
    shared = [World(parts, timeout, world.order) for _ in range(groups)]

    def group_of(rank: int) -> Any:
        made: Any = ThreadCommunicator(world, rank)
        made.sequence_group = ThreadCommunicator(shared[rank // parts], rank % parts, f"sp {rank // parts}", rank)
        return made

    return _run(groups * parts, lambda rank: body(group_of(rank)), [world, *shared], timeout)


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
