"""Errors for failed transfers. torch's own errors name sockets and sizes; these name the rank, the
layer and the operation.
"""

from __future__ import annotations

import re
from types import TracebackType
from typing import Protocol

import torch

from .board import board_for
from .log import TransferLog

__all__: list[str] = []

_OWN_PACE = (
    "Ranks that generate or evaluate different numbers of times do so inside `with "
    "zero3.resident(model):`."
)


class Ranked(Protocol):
    """An object that knows its rank."""

    rank: int
    world_size: int


class Subject:
    """The name of what a transfer is for. The name may change: a layer learns its place in the
    model at its first forward.
    """

    __slots__ = ("label", "log", "name")

    def __init__(self, name: str, label: str = "") -> None:
        self.name, self.label = name, label or name
        self.log: TransferLog | None = None  # the model's

    def rename(self, label: str) -> None:
        self.name, self.label = f"layer {label}", label

    def write_into(self, log: TransferLog) -> None:
        """`log`: the model's, by which errors tell what came before."""
        self.log = log


class NamingFailures:
    """Context in which the error of a failed collective tells the rank and the purpose. It is made
    once and used often.

    Code that runs for every transfer uses `except RuntimeError` and `explain` instead, because
    entering a context costs time.
    """

    __slots__ = ("_caller", "_communicator", "_doing", "subject")

    def __init__(
        self, communicator: Ranked, doing: str, subject: Subject, caller: str = ""
    ) -> None:
        """`caller`: a public function that every rank has to call, if this is its first
        collective.
        """
        self._communicator = communicator
        self._doing = doing
        self._caller = caller
        self.subject = subject

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(failure, RuntimeError):
            self.explain(failure)

    def explain(self, failure: RuntimeError) -> None:
        """Raises an error that tells the rank and the purpose. Returns if it is this rank alone:
        out of memory, a kernel that failed.
        """
        if isinstance(failure, torch.OutOfMemoryError | torch.AcceleratorError):
            return
        where = advice = ""
        if self.subject.log is not None:
            where = f" {self.subject.log.where()}"
            advice = "" if torch.is_grad_enabled() else f" {_OWN_PACE}"
        elsewhere, ranks = self._elsewhere(str(failure)), self._communicator
        raise _of_transfer(
            f"rank {ranks.rank} of {ranks.world_size}: {self._doing} {self.subject.name} failed: "
            f"{failure}\n{elsewhere}Most often another rank died or was cut off, or took another "
            f"path through the model: its own error says why.{where}{advice}"
        ) from failure

    def _elsewhere(self, failure: str) -> str:
        """A line about a function that some ranks have called, and others have not."""
        if (board := board_for(self._communicator)) is None:
            return ""
        timed_out = re.search(r"time?d? ?out", failure, re.IGNORECASE) is not None
        said = board.where(self._caller, f"{self._doing} {self.subject.name}", timed_out=timed_out)
        return said and f"{said}\n"


def _of_transfer(text: str) -> RuntimeError:
    # the caller must not bind it to a local name: that cycle would keep the frame's tensors alive
    error = RuntimeError(text)
    error.zero3_of_transfer = True  # type: ignore[attr-defined]
    return error


def is_transfer_failure(error: BaseException | None) -> bool:
    """Whether `error` comes from a failed collective. After one, the ranks can't communicate any
    more.
    """
    return hasattr(error, "zero3_of_transfer")
