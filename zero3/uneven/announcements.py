"""Ranks with data announce each of their collectives, so that ranks without data can take part."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..comm.agreement import Members, exchange_texts
from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from ..core.collectives import Collective

__all__: list[str] = []

_SILENT = -(2**62)  # what a rank that only listens sends: less than any announcement


class Announcements:
    """An announcement is an all-reduce of two numbers. Listening ranks hear it, and announcing
    ranks hear whether they differ.
    """

    # no collectives: the activity is over; a rank has raised; a step function makes its next one
    END, ABORT, IN_STEP = 0, 2**62 - 1, 2**62 - 2

    def __init__(
        self, listed: Sequence[Collective], control: Communicator, device: torch.device
    ) -> None:
        """`listed`: what a rank without data can take part in, in the same order on all ranks. If
        ranks announce different ones, the last counts.
        """
        self._listed = listed
        # a model has one of some kinds: whichever layer it is told of
        self._numbers: dict[object, int] = {}
        for number, what in enumerate(listed, 1):
            self._numbers[what] = number
            self._numbers.setdefault(type(what), number)
        self._control, self._device = control, device
        self._naming = NamingFailures(
            control, "keeping step with", Subject("ranks that have more or less data")
        )

    def number(self, what: Collective) -> int | None:
        """None: a rank without data can't take part in it."""
        return self._numbers.get(what, self._numbers.get(type(what)))

    def exchange(self, mine: int | None) -> Collective | None:
        """Announces number `mine`, or listens (None). Returns what was announced. None: the
        activity is over, or all make the same step.

        Raises:
            RuntimeError: A rank has raised, or ranks announce different collectives. All ranks
                raise it.
        """
        pair = (_SILENT, _SILENT) if mine is None else (mine, -mine)
        both = torch.tensor(pair, dtype=torch.int64, device=self._device)
        with self._naming:
            self._control.all_reduce(both, maximum=True)
        highest, lowest = int(both[0].item()), int(-both[1].item())
        if highest == self.ABORT:
            raise RuntimeError(
                "another rank raised while some had no data left: its own error says why. All "
                "leave the joinable's context; to drop a micro-batch with an exception and go "
                "on, put it into zero3.step_guard."
            )
        if highest != lowest:
            raise RuntimeError(
                f"ranks have come apart: one {self._told(lowest)}, another {self._told(highest)}"
            )
        return None if highest in (self.END, self.IN_STEP) else self._listed[highest - 1]

    def count(self, numbers: Sequence[int]) -> list[int]:
        """The sums over ranks, which all call it: where they meet, and nobody listens yet."""
        counts = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        with self._naming:
            self._control.all_reduce(counts)
        return [int(each) for each in counts.tolist()]

    def tell(self, text: str) -> list[str]:
        """Every rank's text. All ranks call it, and nobody listens yet."""
        with self._naming:
            return exchange_texts(Members(self._control, self._device), text)

    def _told(self, number: int) -> str:
        if number == self.END:
            return "is through with its forward, backward or step"
        if number == self.IN_STEP:
            return "clips, unscales or updates in its step"
        return str(self._listed[number - 1])
