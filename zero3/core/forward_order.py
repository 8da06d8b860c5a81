"""Which layers a forward calls, in which order: learned, and the same on all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..comm.agreement import agree
from ..comm.communicator import Communicator
from ..policy import ShardingPolicy
from .autograd import inside_backward
from .coordination import Action
from .layer_state import LayerState
from .schedule import ForwardOrder

__all__: list[str] = []

_FOLD_EVERY = 1000  # transfers, where they are not compared: what is noted of them does not pile up


class Passes(Protocol):
    """What a forward under way does with layers: the runtime."""

    def begin_call(self, state: LayerState) -> int:
        """Fetches a layer that this rank does not call; the tick of its beginning."""
        ...

    def end_call(self, state: LayerState, start: int) -> object:
        """Its end: backward will come to it too, or it is released."""
        ...


class LearnedOrder:
    """Calls in any order: learned from forwards, and compared between ranks before anybody relies on it."""

    counts_every_call = False

    def __init__(self, expected: Iterable[LayerState], communicator: Communicator, policy: ShardingPolicy) -> None:
        self.calls: ForwardOrder[LayerState | None] = ForwardOrder(expected)  # None: between outermost modules
        self._communicator = communicator
        self._depth = policy.prefetch_depth
        self._compare_every = policy.compare_every
        self._due = policy.compare_every or _FOLD_EVERY  # at so many transfers the log is looked at
        self._tells = policy.compare_every > 1 and not communicator.tags_messages  # at every forward

    def forget_pass(self) -> None: ...

    def adopt(self, state: LayerState) -> None: ...

    def begin(self, first: LayerState, *, continues: bool) -> None:
        """An outermost module is called, and ranks compare the transfers that they have made.

        Where messages carry no tag, transfers of two layers may meet: there ranks tell each other at every forward, and look at it one
        forward later. Elsewhere they compare after every `compare_every` transfers.
        """
        if continues:
            self.calls.advance(None)
        else:
            self.calls.begin()
        log = first.log
        if self._tells:
            log.look()
            if not first.gate.compares_at_end:
                log.tell(self._communicator, first.device)
        elif log.folded + len(log.entries) >= self._due:
            log.fold()
            if not first.gate.compares_at_end:
                self._due = log.folded + (self._compare_every or _FOLD_EVERY)
                self._compare(first)

    def _compare(self, first: LayerState) -> None:
        if self._compare_every > 1:  # at 1 they are compared one by one
            with first.gate.passing(Action.AGREE, first):
                agree(self._communicator, first.device, "the transfers made so far", [first.log.summary()])

    def enter(self, state: LayerState, passes: Passes) -> list[LayerState]:
        """`state` is called, as the other ranks foresee, or are asked. Returns the layers to prefetch.

        Never beyond the outermost module that runs: what follows it may come after a step.
        """
        if inside_backward():
            return []
        if not self.calls.advance(state):
            place = f"the layer called as number {self.calls.position} of a forward"
            with state.gate.compare(state, place, [state.name_among_ranks]):
                agree(self._communicator, state.device, place, [state.name_among_ranks])
        upcoming = self.calls.upcoming(self._depth)
        return [layer for layer in upcoming[: upcoming.index(None) if None in upcoming else None] if layer is not None]

    def leave(self, state: LayerState, passes: Passes) -> None: ...

    def finish(self, first: LayerState, passes: Passes) -> None:
        self.calls.learn()

    def fail(self, first: LayerState, passes: Passes, error: BaseException) -> None: ...
