"""A layer's transfers, noted as they are made: for the other ranks to compare, for errors to tell, for `step_guard` to repeat."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..comm.agreement import agree
from ..comm.communicator import Communicator
from ..comm.errors import Subject
from ..comm.log import Journal
from ..policy import ShardingPolicy

__all__: list[str] = []


def unwatched(operation: str, *words: str) -> None:
    """No `step_guard` is told."""


class TransferWatch:
    def __init__(self, communicator: Communicator, device: torch.device, policy: ShardingPolicy, subject: Subject) -> None:
        self.journal = Journal()  # the runtime gives all its layers the same
        self.recorder: Callable[..., None] = unwatched
        self._communicator = communicator
        self._device = device
        self._compare_every = policy.compare_every
        self._subject = subject
        subject.journal = self.journal

    def share(self, journal: Journal) -> None:
        self.journal = self._subject.journal = journal

    def gathers(self, identity: int, anything: bool) -> None:
        """`identity` is the layer's, the same on all ranks. `anything`: it has parameters."""
        if not anything:
            return
        self.recorder("gather")
        if self._compare_every == 1:
            self._compare()
        self.journal.note("gathering", self._name, identity)

    def reduces(self) -> None:
        self.journal.note("reducing", self._name, self._communicator.channel)

    def compare_if_due(self) -> None:
        """At the beginning of a forward. Raises on every rank if the ranks have not made the same transfers so far."""
        if self.recorder is unwatched and self.journal.due(self._compare_every):
            self._compare()

    def _compare(self) -> None:
        agree(self._communicator, self._device, "the transfers made so far", [self.journal.summary()])

    @property
    def _name(self) -> str:
        return self._subject.name.removeprefix("layer ")
