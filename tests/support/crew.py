"""Ranks that live on as threads: they do what they are told, all at once, one thing after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.support.live import LiveBytes
from tests.support.ranks import RanksDisagree, ThreadCommunicator, World


class Member:
    """One rank: its communicator, its device, the bytes it holds, and whatever it is told to remember."""

    group: Any
    device: torch.device
    live: LiveBytes
    model: Any
    optimizer: Any
    blocks: list[Any]
    names: dict[int, str]  # id of a parameter -> its name

    def own(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's of one for each rank."""
        return tensors[self.group.rank].to(self.device)


class Crew:
    """`each(action)` runs `action(member)` on every rank at once; returns what each returned, or raises the first error."""

    def __init__(self, world_size: int, timeout: float = 60.0) -> None:
        self.world = World(world_size, timeout)
        self._members = [Member() for _ in range(world_size)]
        self._orders: list[queue.SimpleQueue[Callable[[Member], Any] | None]] = [queue.SimpleQueue() for _ in self._members]
        self._answers: queue.SimpleQueue[tuple[int, Any, BaseException | None]] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._live, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in self._threads:
            thread.start()

    def each(self, action: Callable[[Member], Any]) -> list[Any]:
        for orders in self._orders:
            orders.put(action)
        answers = {}
        for _ in self._orders:
            rank, value, error = self._answers.get(timeout=100)
            answers[rank] = (value, error)
        errors = [answers[rank][1] for rank in sorted(answers) if answers[rank][1] is not None]
        own = next((error for error in errors if not isinstance(error, RanksDisagree)), None)
        if errors:
            raise own or errors[0]
        return [answers[rank][0] for rank in sorted(answers)]

    def dismiss(self) -> None:
        for orders in self._orders:
            orders.put(None)
        for thread in self._threads:
            thread.join(10)

    @contextmanager
    def joined(self, me: Member, rank: int) -> Iterator[None]:
        """Around a rank's life."""
        me.group, me.device = ThreadCommunicator(self.world, rank), torch.device("cpu")
        yield

    def _live(self, rank: int) -> None:
        me = self._members[rank]
        with self.joined(me, rank), LiveBytes() as me.live:
            while (action := self._orders[rank].get()) is not None:
                answer: tuple[int, Any, BaseException | None]
                try:
                    answer = (rank, action(me), None)
                except BaseException as error:
                    self.world.fail(error)
                    answer = (rank, None, error)
                self._answers.put(answer)
                del answer, action
        vars(me).clear()
