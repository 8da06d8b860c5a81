"""Ranks with data announce each of their collectives, so that ranks without data can take part."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

import torch

from ..comm.communicator import Communicator
from ..comm.errors import NamingFailures, Subject
from ..core.coordination import Action, Activity
from ..core.layer_state import LayerState

__all__: list[str] = []

_SILENT = -(2**62)  # what a rank that only listens sends: less than any announcement
_LAYER_BITS = 32  # the low bits of an announcement are the layer's number, the others the action


class Announcements:
    """An announcement is an all-reduce of two numbers. Listening ranks hear it, and announcing
    ranks hear whether they differ.
    """

    def __init__(self, states: Sequence[LayerState], control: Communicator) -> None:
        self._states = states
        self._numbers: dict[object, int] = {state: number for number, state in enumerate(states)}
        self._control = control
        self._naming = NamingFailures(
            control, "keeping step with", Subject("ranks that have more or less data")
        )

    def exchange(self, action: Action | None, layer: object = None) -> tuple[Action, LayerState]:
        """Announces `action`, or listens (None). Returns the action and the layer that were
        announced.

        Raises:
            RuntimeError: A rank has raised, or ranks announce different actions. All ranks raise
                it.
        """
        mine = (
            _SILENT
            if action is None
            else action << _LAYER_BITS | (0 if layer is None else self._numbers[layer])
        )
        opposite = _SILENT if action is None else -mine  # its maximum gives the lowest announcement
        both = torch.tensor([mine, opposite], dtype=torch.int64, device=self._states[0].device)
        with self._naming:
            self._control.all_reduce(both, maximum=True)
        highest, lowest = int(both[0].item()), int(-both[1].item())
        if highest >> _LAYER_BITS == Action.ABORT:
            raise RuntimeError(
                "another rank raised while some had no data left: its own error says why. All "
                "leave the joinable's context; to drop a micro-batch with an exception and go "
                "on, put it into zero3.step_guard."
            )
        if highest != lowest:
            raise RuntimeError(
                f"ranks have come apart: one {self._told(lowest)}, another {self._told(highest)}"
            )
        return Action(highest >> _LAYER_BITS), self._states[self._number_in(highest)]

    def count(self, numbers: Sequence[int]) -> list[int]:
        """The sums over ranks, which all call it: where they meet, and nobody listens yet."""
        counts = torch.tensor(numbers, dtype=torch.int64, device=self._states[0].device)
        with self._naming:
            self._control.all_reduce(counts)
        return [int(each) for each in counts.tolist()]

    def _number_in(self, code: int) -> int:
        return code & (1 << _LAYER_BITS) - 1

    def _told(self, code: int) -> str:
        label = self._states[self._number_in(code)].label
        return {
            Action.END: "is through with its forward or backward",
            Action.GATHER: f"gathers layer {label}",
            Action.REDUCE: f"reduces the gradients of layer {label}",
            Action.KEEP: f"reduces the gradients of layer {label} in its replica alone",
            Action.SETTLE: "waits for its gradients",
            Action.AGREE: "has come to a layer that was not foreseen",
            Action.LOOK: "begins a forward",
            Action.TOKENS: "counts tokens",
            Action.GUARD: "ends a guarded micro-batch",
        }[Action(code >> _LAYER_BITS)]


class EntersActivities(Protocol):
    def enter(self, kind: Activity) -> None: ...

    def leave(self, kind: Activity, error: BaseException | None = None) -> None: ...


class Doing:
    """Context for a forward or a backward of this rank. A backward that raises does not leave
    it.
    """

    def __init__(self, coordinator: EntersActivities, activity: Activity) -> None:
        self._coordinator = coordinator
        self._activity = activity

    def __enter__(self) -> None:
        self._coordinator.enter(self._activity)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._coordinator.leave(self._activity, error)
