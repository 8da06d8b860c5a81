"""ShardingPolicy(dynamic=True): ranks may leave out different layers. They still take part in the
transfers of these layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from ..comm.agreement import agree
from ..core.autograd import checkpoint_around, inside_backward
from ..core.layer_state import LayerState
from ..core.schedule import ForwardOrder, Passes

__all__: list[str] = []

L = TypeVar("L", bound=Hashable)


class Event(NamedTuple, Generic[L]):
    """The begin or the end of a layer's call."""

    layer: L
    begins: bool


class StaticOrder(Generic[L]):
    """The order of layers in the model. A forward may leave out layers, but must call the others in
    this order.

    It tells which calls a forward has passed over, so that the rank can take part in their
    transfers.
    """

    def __init__(self, nested: Iterable[tuple[L, int]]) -> None:
        """`nested`: the layers in order, outer before inner, each with its depth."""
        self._events: list[Event[L]] = []
        under_way: list[tuple[L, int]] = []
        for layer, depth in nested:
            while under_way and under_way[-1][1] >= depth:
                self._events.append(Event(under_way.pop()[0], begins=False))
            self._events.append(Event(layer, begins=True))
            under_way.append((layer, depth))
        self._events += [Event(layer, begins=False) for layer, _ in reversed(under_way)]
        self._next = 0

    def begin(self) -> None:
        self._next = 0

    def until(self, layer: L, *, begins: bool) -> list[Event[L]] | None:
        """The events that are passed over before `layer` begins or ends. None if that event is
        already over.
        """
        try:
            at = self._events.index(Event(layer, begins), self._next)
        except ValueError:
            return None
        passed, self._next = self._events[self._next : at], at + 1
        return passed

    def rest(self) -> list[Event[L]]:
        passed, self._next = self._events[self._next :], len(self._events)
        return passed

    def upcoming(self, depth: int) -> list[L]:
        """The layers that begin next, at most `depth`."""
        return list(
            islice((event.layer for event in self._events[self._next :] if event.begins), depth)
        )


class DynamicOrder:
    """Calls in the order of layers in the model, where each rank may leave out any of them."""

    counts_every_call = True  # also calls that this rank's backward will not reach
    counts_without_graph = False

    def __init__(self, nested: Iterable[tuple[LayerState, int]], depth: int) -> None:
        # stays empty: the order is known
        self.calls: ForwardOrder[LayerState | None] = ForwardOrder()
        self._order = StaticOrder(nested)
        self._depth = depth
        # layer that this rank leaves out -> the tick at which its call began
        self._passed_over: dict[LayerState, int] = {}
        # the checkpoint around the call of the layer that was entered last
        self._checkpoint: weakref.ref[Any] | None = None

    @property
    def is_recomputed(self) -> bool:
        return checkpoint_around() is not None

    def forget_pass(self) -> None:
        self._passed_over.clear()

    def adopt(self, state: LayerState) -> None:
        """Refuses a layer that was found in the graph, behind this runtime's layers.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"layer {state.label} is called by a plain module, after others with "
            "ShardingPolicy(dynamic=True): a rank that leaves it out could not know of it. Put "
            "the layers into one Zero3Sequential, or use zero3.shard(model)."
        )

    def begin(self, *, continues: bool) -> None:
        self._order.begin()
        self._checkpoint = None

    def enter(self, state: LayerState, passes: Passes) -> list[LayerState]:
        """Called before a layer's forward: makes the transfers of the layers left out before it.
        Returns the layers to prefetch.
        """
        self._check_checkpoint(state)
        self._pass_over(self._order.until(state, begins=True), passes, state)
        return self._order.upcoming(self._depth)

    def _check_checkpoint(self, state: LayerState) -> None:
        around = checkpoint_around() if torch.is_grad_enabled() else None
        if around is not None and self._checkpoint is not None and self._checkpoint() is around:
            raise ValueError(
                f"layer {state.label} is called in one checkpoint with another layer. With "
                "ShardingPolicy(dynamic=True) a checkpoint holds one layer, because a rank "
                "gathers all layers of a checkpoint to recompute it, and the others, which leave "
                "out some, do not. Put a checkpoint around each layer."
            )
        self._checkpoint = None if around is None else weakref.ref(around)

    def recompute(self, state: LayerState) -> list[LayerState]:
        """Called in place of `enter` inside a backward.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"layer {state.label}: reentrant checkpointing does not go together with "
            "ShardingPolicy(dynamic=True), for ranks would recompute different layers. Use "
            "checkpoint(..., use_reentrant=False)."
        )

    def leave(self, state: LayerState, passes: Passes) -> None:
        """Called after a layer's forward: makes the transfers of inner layers that it left out."""
        if not inside_backward():
            self._pass_over(self._order.until(state, begins=False), passes, state)

    def finish(self, first: LayerState, passes: Passes) -> None:
        """Called at the end of a pass: makes the transfers of the remaining layers, and compares
        all transfers between ranks.
        """
        self._pass_over(self._order.rest(), passes)
        agree(first, "the end of a forward", [first.log.summary()])

    def fail(self, first: LayerState, passes: Passes, error: BaseException) -> None:
        """Called if a pass raises: makes the other ranks' transfers up to the end of the forward,
        and then tells them the error.
        """
        if not isinstance(error, Exception):
            return
        try:
            self._pass_over(self._order.rest(), passes)
            cause = RuntimeError(f"its forward failed with {type(error).__name__}: {error}")
            agree(first, "the end of a forward", [], cause)
        # the caller raises this rank's own error
        except (RuntimeError, ValueError, TypeError) as told:
            # its frames would form a cycle and keep the forward's tensors alive
            told.__traceback__ = None

    def _pass_over(
        self,
        passed: list[Event[LayerState]] | None,
        passes: Passes,
        state: LayerState | None = None,
    ) -> None:
        """Takes part in the transfers of layers that this rank leaves out. They are recorded, so
        that its backward does the same.
        """
        if passed is None:
            label = state.label if state is not None else ""
            raise ValueError(
                f"layer {label} is called a second time in a forward, or after layers that stand "
                "behind it in the model. With ShardingPolicy(dynamic=True) layers are called in "
                "the order in which they stand, each at most once."
            )
        for layer, begins in passed:
            if begins:
                self._passed_over[layer] = passes.begin_call(layer)
            # None: this rank called the layer, and the call raised
            elif (start := self._passed_over.pop(layer, None)) is not None:
                passes.end_call(layer, start)
