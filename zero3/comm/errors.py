"""What a failed transfer was for: torch's errors name sockets and sizes, ours the rank, the layer and what was being done."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

import torch

from .log import TransferLog

__all__: list[str] = []

_OF_TRANSFER = "zero3_of_transfer"
_OWN_PACE = "Ranks that generate or evaluate different numbers of times do so inside `with zero3.resident(model):`."


class Ranked(Protocol):
    """One of several ranks."""

    rank: int
    world_size: int


class Subject:
    """What a transfer is for, by a name that may still change: a layer learns its place in the model at its first forward."""

    __slots__ = ("log", "name")

    def __init__(self, name: str, log: TransferLog | None = None) -> None:
        self.name = name
        self.log = log  # of its model


class NamingFailures:
    """A context: a collective that fails or times out inside says what it was for, and on which rank. Made once, used often.

    Where the context would cost too much (every transfer of every step), `except RuntimeError` and `explain` do the same.
    """

    __slots__ = ("_communicator", "_doing", "_subject")

    def __init__(self, communicator: Ranked, doing: str, subject: Subject) -> None:
        self._communicator = communicator
        self._doing = doing
        self._subject = subject

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(failure, RuntimeError):
            self.explain(failure)

    def explain(self, failure: RuntimeError) -> None:
        """Raises an error that says what `failure` was a failure of. Returns where there is nothing to add."""
        if isinstance(failure, torch.OutOfMemoryError):
            return
        where = advice = ""
        if self._subject.log is not None:
            where = f" {self._subject.log.where()}"
            advice = "" if torch.is_grad_enabled() else f" {_OWN_PACE}"
        raise _of_transfer(
            f"rank {self._communicator.rank} of {self._communicator.world_size}: {self._doing} {self._subject.name} failed: {failure}\n"
            f"Most often another rank died or was cut off, or took another path through the model: its own error says why.{where}{advice}"
        ) from failure


def _of_transfer(text: str) -> RuntimeError:
    error = RuntimeError(text)  # no frame that it passes may know it by name: a cycle would keep its tensors alive
    error.__dict__[_OF_TRANSFER] = True
    return error


def is_transfer_failure(error: BaseException | None) -> bool:
    """Whether it was a collective that failed: then the ranks can't speak to each other any more."""
    return error is not None and _OF_TRANSFER in vars(error)
