"""The order in which forwards call layers. It is learned, and is the same on all ranks."""

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

_FOLD_EVERY = 1000  # transfers; if they are not compared, the log is folded this often, so that it stays short


class Passes(Protocol):
    """The part of the runtime that an order uses for layers that this rank leaves out."""

    def begin_call(self, state: LayerState) -> int:
        """Fetches the layer. Returns the tick at which its call begins."""
        ...

    def end_call(self, state: LayerState, start: int) -> object:
        """Records the call for the backward. Without gradients it releases the layer."""
        ...


class LearnedOrder:
    """Calls in any order. The order is learned from forwards. Ranks compare each call that the order does not predict."""

    counts_every_call = False

    def __init__(self, expected: Iterable[LayerState], communicator: Communicator, policy: ShardingPolicy) -> None:
        self.calls: ForwardOrder[LayerState | None] = ForwardOrder(expected)  # None: the next outermost module begins
        self._communicator = communicator
        self._depth = policy.prefetch_depth
        self._compare_every = policy.compare_every
        self._due = policy.compare_every or _FOLD_EVERY  # the number of transfers at which the log is folded or compared
        self._tells = policy.compare_every > 1 and not communicator.tags_messages  # whether ranks exchange hashes at every forward

    def forget_pass(self) -> None: ...

    def adopt(self, state: LayerState) -> None: ...

    def begin(self, first: LayerState, *, continues: bool) -> None:
        """Called before an outermost module's forward. Ranks compare their transfers so far.

        If messages carry no tag, transfers of two different layers could be matched by mistake. So ranks send their hashes at every
        forward, and compare them one forward later. Otherwise they compare after every `compare_every` transfers.
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
        if self._compare_every > 1:  # at 1, `ComparingGate` compares before each gather
            with first.gate.passing(Action.AGREE, first):
                agree(self._communicator, first.device, "the transfers made so far", [first.log.summary()])

    def enter(self, state: LayerState, passes: Passes) -> list[LayerState]:
        """Called before a layer's forward. Ranks compare the layer if their order did not predict it. Returns the layers to prefetch.

        Layers after the present outermost module are not prefetched, because an optimizer may step before them.
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
