"""ShardingPolicy(dynamic=True): ranks leave out different layers, and each takes part in the transfers of those that it leaves out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from ..comm.agreement import agree
from .autograd import inside_backward
from .forward_order import Passes
from .layer_state import LayerState
from .schedule import ForwardOrder

__all__: list[str] = []

L = TypeVar("L", bound=Hashable)


class Event(NamedTuple, Generic[L]):
    """A layer's call begins, or ends."""

    layer: L
    begins: bool


class StaticOrder(Generic[L]):
    """The one order in which a forward may call layers, any of which it may leave out: that in which they stand in the model.

    For ranks that leave out different ones: what a rank passes over, it still takes part in.
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
        """What is passed over before `layer` begins or ends; None if that lies behind."""
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
        return list(islice((event.layer for event in self._events[self._next :] if event.begins), depth))


class DynamicOrder:
    """Calls in the order in which layers stand in the model; any of them may be left out."""

    counts_every_call = True  # also one that this rank's backward will not reach

    def __init__(self, nested: Iterable[tuple[LayerState, int]], depth: int) -> None:
        self.calls: ForwardOrder[LayerState | None] = ForwardOrder()  # nothing is learned
        self._order = StaticOrder(nested)
        self._depth = depth
        self._passed_over: dict[LayerState, int] = {}  # layers that this rank has not called: when they began

    def forget_pass(self) -> None:
        self._passed_over.clear()

    def adopt(self, state: LayerState) -> None:
        """A layer that was found to follow in the graph.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"layer {state.label} is called by a plain module, after others with ShardingPolicy(dynamic=True): a rank that leaves it "
            "out could not know of it. Put the layers into one Zero3Sequential, or use zero3.shard(model)."
        )

    def begin(self, first: LayerState, *, continues: bool) -> None:
        self._order.begin()

    def enter(self, state: LayerState, passes: Passes) -> list[LayerState]:
        """`state` is called: makes the transfers of those before it. Returns the layers to prefetch."""
        if inside_backward():
            raise RuntimeError(
                f"layer {state.label}: reentrant checkpointing does not go together with ShardingPolicy(dynamic=True), for ranks would "
                "recompute different layers. Use checkpoint(..., use_reentrant=False)."
            )
        self._pass_over(self._order.until(state, begins=True), passes, state)
        return self._order.upcoming(self._depth)

    def leave(self, state: LayerState, passes: Passes) -> None:
        """The call of `state` is over."""
        if not inside_backward():
            self._pass_over(self._order.until(state, begins=False), passes, state)

    def finish(self, first: LayerState, passes: Passes) -> None:
        """The outermost module is through: makes the transfers of the layers behind, and compares all with the other ranks."""
        self._pass_over(self._order.rest(), passes)
        agree(first.communicator, first.device, "the end of a forward", [first.log.summary()])

    def fail(self, first: LayerState, passes: Passes, error: BaseException) -> None:
        """The others wait for this rank's part in the rest of the forward; then they hear why it ends."""
        if not isinstance(error, Exception):
            return
        try:
            self._pass_over(self._order.rest(), passes)
            cause = RuntimeError(f"its forward failed with {type(error).__name__}: {error}")
            agree(first.communicator, first.device, "the end of a forward", [], cause)
        except (RuntimeError, ValueError, TypeError) as told:  # this rank's own error is on its way
            told.__traceback__ = None  # a cycle: it would keep the forward's tensors alive

    def _pass_over(self, passed: list[Event[LayerState]] | None, passes: Passes, state: LayerState | None = None) -> None:
        """Takes part in transfers of layers that this rank passes over, and others may call; a backward will make theirs too."""
        if passed is None:
            label = state.label if state is not None else ""
            raise ValueError(
                f"layer {label} is called a second time in a forward, or after layers that stand behind it in the model. With "
                "ShardingPolicy(dynamic=True) layers are called in the order in which they stand, each at most once."
            )
        for layer, begins in passed:
            if begins:
                self._passed_over[layer] = passes.begin_call(layer)
            elif (start := self._passed_over.pop(layer, None)) is not None:  # else a call of this rank's own that raised
                passes.end_call(layer, start)
