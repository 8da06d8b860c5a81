"""The order of layers in forward, and the order in which a backward opens and closes the calls of
its forward. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

__all__: list[str] = []

L = TypeVar("L", bound=Hashable)


class ForwardOrder(Generic[L]):
    """Learns the orders in which forwards call their layers, and predicts the next layers from
    them.

    All ranks learn the same orders, and all follow the same one. So ranks need not compare a call
    that this order predicts. They compare any other call, even if another known order begins like
    this pass, because a rank's choice of order may depend on its data. After the comparison this
    pass follows that known order. If there is none, nothing is predicted for the rest of the pass.
    """

    MAX_KNOWN = 8  # training, evaluation, generation with and without a cache, ...

    def __init__(self, expected: Iterable[L] = ()) -> None:
        self._first = tuple(expected)
        # the last one used comes first
        self._known: list[tuple[L, ...]] = [self._first] if self._first else []
        self._seen: list[L] = []
        self._follows: tuple[L, ...] | None = None

    @property
    def position(self) -> int:
        """The number of calls in this pass so far."""
        return len(self._seen)

    @property
    def predicts(self) -> bool:
        """Whether this pass follows a known order."""
        return self._follows is not None

    def begin(self) -> None:
        self._seen = []
        self._follows = self._known[0] if self._known else None

    def advance(self, layer: L) -> bool:
        """Notes that `layer` is called now. Returns whether the order that this pass follows
        predicted it.
        """
        position = len(self._seen)
        self._seen.append(layer)
        order = self._follows
        if order is None:
            return False
        if position < len(order) and order[position] == layer:
            return True
        seen = tuple(self._seen)
        self._follows = next(
            (known for known in self._known if known[: position + 1] == seen), None
        )
        return False

    @property
    def known(self) -> tuple[tuple[L, ...], ...]:
        """The known orders. The last one used comes first."""
        return tuple(self._known)

    def expect(self, known: Sequence[tuple[L, ...]]) -> None:
        """Restores the orders that `known` returned earlier. Orders that were learned since come
        after them.
        """
        self._known = [*known, *(order for order in self._known if order not in known)][
            : self.MAX_KNOWN
        ]

    def upcoming(self, depth: int) -> Sequence[L]:
        """The next predicted layers, at most `depth`."""
        position = len(self._seen)
        return self._follows[position : position + depth] if self._follows is not None else ()

    def forget(self) -> None:
        """Forgets all learned orders. This is needed if ranks ran different forwards, and so
        learned different orders.
        """
        self._known = [self._first] if self._first else []
        self._follows = None

    def learn(self) -> None:
        """Called when a pass is over. Its order is known from now on, and the next pass follows it
        first.
        """
        if not self._seen:
            return
        order = self._follows if self._follows is not None else tuple(self._seen)
        if order in self._known:
            self._known.remove(order)
        self._known = [order, *self._known][: self.MAX_KNOWN]


class Passes(Protocol):
    """The part of the runtime that an order uses for layers that this rank leaves out."""

    def begin_call(self, layer: Any, ahead: Sequence[Any] = ()) -> int:
        """Fetches the layer, and starts to fetch those `ahead`. Returns the tick at which its call
        begins.
        """
        ...

    def end_call(self, layer: Any, start: int) -> object:
        """Records the call for the backward. Without gradients it releases the layer."""
        ...

    def note_compared(self) -> None:
        """Ranks have compared the calls of this forward."""
        ...


class Order(Protocol[L]):
    """What a runtime asks of the order of its layers' calls. See `LearnedOrder`."""

    @property
    def counts_every_call(self) -> bool:
        """Whether each call is recorded, since another rank may need it."""
        ...

    @property
    def counts_without_graph(self) -> bool:
        """Whether even one that is made with gradients off is, since it may be recomputed."""
        ...

    @property
    def is_recomputed(self) -> bool:
        """Whether a checkpoint recomputes the call that is made now. That may come before a
        gradient does, and on some ranks alone: so it opens the call for backward.
        """
        ...

    @property
    def calls(self) -> ForwardOrder[Any]: ...

    def adopt(self, layer: L) -> None: ...

    def begin(self, *, continues: bool) -> None: ...

    def enter(self, layer: L, passes: Passes) -> list[L]: ...

    def recompute(self, layer: L) -> list[L]: ...

    def finish(self, first: L, passes: Passes) -> None: ...


class OwnOrder(Order[L], Protocol[L]):
    """One that is not learned: this rank makes the transfers of layers that it leaves out, too."""

    def leave(self, layer: L, passes: Passes) -> None:
        """Called after a layer's forward."""
        ...

    def fail(self, first: L, passes: Passes, error: BaseException) -> None:
        """The pass has raised `error`."""
        ...

    def forget_pass(self) -> None: ...


class LearnedOrder(Generic[L]):
    """Calls in any order. The order is learned from forwards. Ranks compare each call that the
    order does not predict.
    """

    counts_every_call = counts_without_graph = is_recomputed = False

    def __init__(
        self, expected: Iterable[L], depth: int, compare: Callable[[L, int], None]
    ) -> None:
        """`compare`: of a layer, and its number in the forward, between ranks."""
        # None: the next outermost module begins
        self.calls: ForwardOrder[L | None] = ForwardOrder(expected)
        self._depth = depth
        self._compare = compare

    def adopt(self, layer: L) -> None: ...

    def begin(self, *, continues: bool) -> None:
        """Called before an outermost module's forward."""
        if continues:
            self.calls.advance(None)
        else:
            self.calls.begin()

    def enter(self, layer: L, passes: Passes) -> list[L]:
        """Called before a layer's forward. Returns the layers to prefetch.

        Layers after the present outermost module are not prefetched, because an optimizer may step
        before them.
        """
        if not self.calls.advance(layer):
            self._compare(layer, self.calls.position)
        ahead = list[L]()
        for each in self.calls.upcoming(self._depth):
            if each is None:
                break
            ahead.append(each)
        return ahead

    def recompute(self, layer: L) -> list[L]:
        """Called in place of `enter` inside a backward, which knows its order itself."""
        return []

    def finish(self, first: L, passes: Passes) -> None:
        self.calls.learn()


@dataclass(eq=False, slots=True)
class Frame(Generic[L]):
    """A layer's forward under way."""

    layer: L
    start: int  # tick of the trace's clock
    clock: int  # value of `graph_clock` at the start: this forward's nodes are not older
    # whether the call is not recorded: a recomputation, or inside `resident`
    recomputes: bool = False
    opened: bool = False  # it recomputes a call of a trace, which it has opened for backward
    fetched_here: bool = True  # whether this forward has fetched the layer
    # nodes behind the arguments. A recomputation's clock says nothing of those: on a GPU it has
    # another thread than the forward that made them, and so other numbers
    older: Set[Any] = frozenset()


class CallStack(Generic[L]):
    """A model's layers, and the frames of forwards under way, outer before inner. Inside a backward
    these are recomputations.
    """

    def __init__(self, layers: Iterable[L]) -> None:
        self.layers = list(layers)
        self.frames: list[Frame[L]] = []
        # of layers of several modules: for how many calls of this pass they stay fetched
        self._awaited: dict[L, int] = {}

    def is_under_way(self, layer: L) -> bool:
        return any(frame.layer is layer for frame in self.frames)

    def count_call(self, layer: L, modules: int) -> None:
        """One of the layer's modules was called. The first call is the first of `modules`."""
        self._awaited[layer] = (self._awaited.get(layer) or modules) - 1

    def await_calls(self, layer: L, calls: int) -> None:
        self._awaited[layer] = calls

    def awaits_calls(self, layer: L) -> bool:
        return self._awaited.get(layer, 0) > 0

    def await_no_calls(self) -> None:
        self._awaited.clear()


class CallPhase(Enum):
    PENDING = "pending"  # backward has not reached it
    OPEN = "open"  # fetched for backward, gradients arriving
    CLOSED = "closed"  # released and backed up


@dataclass(eq=False, slots=True)
class Call(Generic[L]):
    """One call of a layer in a forward with gradients. `start` and `end` are ticks of the trace's
    clock.
    """

    layer: L
    start: int
    end: int
    index: int
    phase: CallPhase = CallPhase.PENDING
    # the numbers of those that one checkpoint recomputes, this one too, and their layers
    together: Sequence[int] = ()
    layers: Sequence[L] = ()
    gathers: bool = True  # whether its backward needs the layer's parameters

    def leave_out_gather(self) -> None:
        self.gathers = False


class Step(NamedTuple, Generic[L]):
    """A step of backward: it opens or closes a call. `reduce`: the layer's gradient is complete and
    can be reduced.
    """

    call: Call[L]
    opens: bool
    reduce: bool = False


@dataclass(eq=False)
class CallTrace(Generic[L]):
    """The calls of one forward, in the order in which they ended. Backward walks over them from the
    last to the first.

    A backward's collectives must not depend on the path of gradients on this rank. So when a
    gradient reaches a call, the walk opens all later calls first, and closes the calls that are
    over. A call is over when the walk opens another one that ended before this call began:

        outer  |--------------------------------|        opening a closes b, because a ended before
        b began; inner      |---- a ----|  |---- b ----|          outer began before a ended: it
        closes only at the end clock  1   2           3  4           5  6
    """

    calls: list[Call[L]] = field(default_factory=list)
    serial: int = 0  # the number of the forward; later forwards have higher ones
    task: int = 0  # the number of the backward that reached this trace last
    reduces: bool = False  # whether that backward computes gradients of parameters
    walked: bool = False  # whether a backward has walked over it
    compared: bool = False  # whether ranks have compared its calls, when the forward was over
    # calls that their recomputations open, such as those that were made with gradients off
    recomputed: list[Call[L]] = field(default_factory=list)
    _clock: int = 0
    _since: float = inf  # see `unite`
    _cursor: int = -1  # the index of the call that is opened next
    _open: list[Call[L]] = field(default_factory=list)
    # layer -> its call that began first, and that backward closes last
    _first: dict[L, Call[L]] = field(default_factory=dict)

    def begin(self) -> int:
        self._clock += 1
        return self._clock

    def record(self, layer: L, start: int, *, recomputed: bool = False) -> Call[L]:
        call = Call(layer, start, self.begin(), len(self.calls))
        if recomputed:
            self.recomputed.append(call)
        # the layer may have called itself
        if layer not in self._first or start < self._first[layer].start:
            self._first[layer] = call
        self.calls.append(call)
        self._cursor = call.index
        if start > self._since:
            self.unite(self._since)
        return call

    @property
    def now(self) -> int:
        return self._clock

    def unite(self, since: float) -> None:
        """One checkpoint recomputes all calls that have begun after the tick `since`, also those
        that end later. While one is open, the layers of all of them stay fetched.
        """
        self._since = since
        if since == inf:
            return
        together = [call for call in self.calls if call.start > since]
        numbers = [call.index for call in together]
        layers = list(dict.fromkeys(call.layer for call in together))
        for call in together:
            call.together, call.layers = numbers, layers
        self.recomputed = sorted({*self.recomputed, *together}, key=lambda call: call.index)

    def note_compared(self) -> None:
        self.compared = True

    def holds(self, layer: L) -> bool:
        return layer in self._first

    def has_opened(self, layer: L) -> bool:
        return any(call.layer is layer for call in self._open)

    def is_open(self, layer: L) -> bool:
        for call in self._open:  # noqa: SIM110 (a generator costs more, and each release asks)
            if call.layer == layer or layer in call.layers:
                return True
        return False

    def advance(self, call: Call[L]) -> Iterator[Step[L]]:
        """The steps until `call` is open."""
        while self._cursor >= call.index:
            following = self.calls[self._cursor]
            self._cursor -= 1
            # before others close, so that a layer called twice in a row stays fetched
            opening = self._opened(following)
            yield from self._close_those_after(following.end)
            yield opening
        # the gradient came later than the order of the forward implies
        if call.phase is CallPhase.CLOSED:
            yield self._opened(call)

    def finish(self, *, complete: bool) -> Iterator[Step[L]]:
        """The steps that end a backward. `complete`: calls that no gradient reached are opened and
        closed too.
        """
        if complete and self.calls:
            yield from self.advance(self.calls[0])
        yield from self._close_those_after(0)
        self.rewind()

    def rewind(self) -> None:
        """Makes the trace ready for another backward through the same graph (`retain_graph`)."""
        self.walked = True
        for call in self.calls:
            call.phase = CallPhase.PENDING
        self._open.clear()
        self._cursor = len(self.calls) - 1

    def upcoming(self, depth: int) -> list[L]:
        """The layers that backward gathers next, at most `depth` of them."""
        ahead, at = list[L](), self._cursor
        while at >= 0 and len(ahead) < depth:
            if self.calls[at].gathers:
                ahead.append(self.calls[at].layer)
            at -= 1
        return ahead

    def reached_by(self, task: int, *, reduces: bool) -> None:
        """A backward has come to this trace."""
        self.task, self.reduces = task, reduces

    def _opened(self, call: Call[L]) -> Step[L]:
        call.phase = CallPhase.OPEN
        self._open.append(call)
        return Step(call, opens=True)

    def _close_those_after(self, end: int) -> Iterator[Step[L]]:
        over = [call for call in self._open if call.start > end]
        if len(over) > 1:
            over.sort(key=lambda call: -call.start)
        for call in over:
            self._open.remove(call)
            call.phase = CallPhase.CLOSED
            yield Step(call, opens=False, reduce=self._first[call.layer] is call)
