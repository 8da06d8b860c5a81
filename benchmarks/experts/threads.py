"""Ranks as threads that count what they send: enough of a communicator to shard a model and to train it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zero3.comm.streams import Done, Lanes, Pending, lanes_for


class Meeting:
    """Where the threads of a group leave what the others take."""

    def __init__(self, size: int) -> None:
        self._left: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=600)

    def swap(self, rank: int, value: Any) -> list[Any]:
        self._left[rank] = value
        self._barrier.wait()
        found = list(self._left)
        self._barrier.wait()
        return found

    def give_up(self) -> None:
        self._barrier.abort()


class CountingRank:
    """`sent`: bytes that this rank has sent to others, by the kind of collective."""

    takes_pieces = tags_messages = False
    replica = channel = 0

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self._meeting, self.rank, self.shard_rank = meeting, rank, rank
        self.world_size = self.shards = size
        self.sent = {"gather": 0, "reduce": 0, "tokens": 0}

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Any = None) -> Pending:
        self.sent["gather"] += shard.nbytes * (self.world_size - 1)
        full.copy_(torch.cat(self._meeting.swap(self.rank, shard.clone())))
        return Done()

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Any = None) -> Pending:
        self.sent["reduce"] += full.nbytes - shard.nbytes
        start = self.rank * shard.numel() if bounds is None else bounds[self.rank]
        everyone = self._meeting.swap(self.rank, full)
        shard.copy_(torch.stack([each[start : start + shard.numel()] for each in everyone]).sum(0))
        self._meeting.swap(self.rank, None)  # all have read
        return Done()

    def all_to_all(self, received: Tensor, sent: Tensor, bounds: Any = None, into: Any = None) -> Pending:
        cuts = bounds or [rank * sent.numel() // self.world_size for rank in range(self.world_size + 1)]
        slices = [sent[start:stop] for start, stop in pairwise(cuts)]
        self.sent["tokens"] += sent.nbytes - slices[self.rank].nbytes
        everyone = self._meeting.swap(self.rank, slices)
        received.copy_(torch.cat([each[self.rank] for each in everyone]))
        self._meeting.swap(self.rank, None)
        return Done()

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        found = torch.stack(self._meeting.swap(self.rank, tensor.clone()))
        tensor.copy_(found.amax(0) if maximum else found.sum(0))

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Any = None) -> Pending:
        shard.copy_(self._meeting.swap(self.rank, slices)[0][self.rank])
        self._meeting.swap(self.rank, None)
        return Done()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        tensor.copy_(self._meeting.swap(self.rank, tensor.clone())[source])

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        return self._meeting.swap(self.rank, payload)

    def exchange_later(self, payload: bytes, device: torch.device) -> Any:
        told = self._meeting.swap(self.rank, payload)
        return type("Told", (), {"ready": lambda self: True, "read": lambda self: told})()

    def duplicate(self) -> CountingRank:
        return self

    def lanes(self, device: torch.device) -> Lanes:
        return lanes_for(device)

    def same_ranks(self, other: object) -> bool:
        return other is self

    def message_board(self) -> None:
        return None


def on_threads(size: int, body: Callable[[CountingRank], Any]) -> Sequence[Any]:
    """What `body` returned on each rank, or the first error."""
    meeting, found, errors = Meeting(size), [None] * size, list[BaseException]()

    def run(rank: int) -> None:
        try:
            found[rank] = body(CountingRank(meeting, rank, size))
        except BaseException as error:
            errors.append(error)
            meeting.give_up()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    first = next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), None)
    if errors:
        raise first or errors[0]
    return found
