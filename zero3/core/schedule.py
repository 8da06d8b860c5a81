"""Which layer comes next in forward, and in which order a backward opens and closes the calls of its forward. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

__all__: list[str] = []

L = TypeVar("L", bound=Hashable)


class ForwardOrder(Generic[L]):
    """The orders in which forwards call their layers, learned from those that ran, used to look ahead.

    All ranks learn the same orders and expect the same one, so a layer that it foresees needs no word with the other
    ranks. A layer that comes otherwise does, though another known order begins so: to which one a rank turns depends
    on its data. That order is followed then; where there is none, nothing is foreseen for the rest of the pass.
    """

    MAX_KNOWN = 8  # training, evaluation, generation with and without a cache, ...

    def __init__(self, expected: Iterable[L] = ()) -> None:
        self._first = tuple(expected)
        self._known: list[tuple[L, ...]] = [self._first] if self._first else []  # the one used last comes first
        self._seen: list[L] = []
        self._follows: tuple[L, ...] | None = None

    @property
    def position(self) -> int:
        """How many layers this pass has called."""
        return len(self._seen)

    def begin(self) -> None:
        self._seen = []
        self._follows = self._known[0] if self._known else None

    def advance(self, layer: L) -> bool:
        """Notes that `layer` is called now; True if the order that this pass follows foresaw it."""
        position = len(self._seen)
        self._seen.append(layer)
        order = self._follows
        if order is None:
            return False
        if position < len(order) and order[position] == layer:
            return True
        seen = tuple(self._seen)
        self._follows = next((known for known in self._known if known[: position + 1] == seen), None)
        return False

    @property
    def known(self) -> tuple[tuple[L, ...], ...]:
        """The one used last comes first."""
        return tuple(self._known)

    def expect(self, known: Sequence[tuple[L, ...]]) -> None:
        """From the next pass on, looks for these orders first, as when `known` was asked for."""
        self._known = [*known, *(order for order in self._known if order not in known)][: self.MAX_KNOWN]

    def upcoming(self, depth: int) -> Sequence[L]:
        """The layers expected next, at most `depth`."""
        position = len(self._seen)
        return self._follows[position : position + depth] if self._follows is not None else ()

    def forget(self) -> None:
        """Back to what was expected at first: ranks that did not all run the same forwards have learned different orders."""
        self._known = [self._first] if self._first else []
        self._follows = None

    def learn(self) -> None:
        """The pass is over: its order is known from now on, and expected first next time."""
        if not self._seen:
            return
        order = self._follows if self._follows is not None else tuple(self._seen)
        if order in self._known:
            self._known.remove(order)
        self._known = [order, *self._known][: self.MAX_KNOWN]


@dataclass(eq=False, slots=True)
class Frame(Generic[L]):
    """A layer's forward under way."""

    layer: L
    start: int  # tick of the trace's clock
    clock: int  # of the graph: nodes that this forward makes are not older
    recomputes: bool = False
    fetched_here: bool = True


class CallStack(Generic[L]):
    """A model's layers, and their forwards under way: outer before inner. Inside a backward these are recomputations."""

    def __init__(self, layers: Iterable[L]) -> None:
        self.layers = list(layers)
        self.frames: list[Frame[L]] = []

    def is_under_way(self, layer: L) -> bool:
        return any(frame.layer is layer for frame in self.frames)


class CallPhase(Enum):
    PENDING = "pending"  # backward has not come to it
    OPEN = "open"  # fetched for backward, gradients arriving
    CLOSED = "closed"  # backed up and released


@dataclass(eq=False, slots=True)
class Call(Generic[L]):
    """One call of a layer in a forward with gradients. `start` and `end` are ticks of the trace's clock."""

    layer: L
    start: int
    end: int
    index: int
    phase: CallPhase = CallPhase.PENDING


class Step(NamedTuple, Generic[L]):
    """What backward does next with a call. `reduce`: nothing more can flow to its layer, its gradient is complete."""

    call: Call[L]
    opens: bool
    reduce: bool = False


@dataclass(eq=False)
class CallTrace(Generic[L]):
    """The calls of one forward, in the order in which they ended; backward walks them from the last to the first.

    Which collectives a backward makes must not depend on where gradients happen to flow on this rank. So when the
    gradient of a call arrives, all calls that the walk would have opened before are opened too, and those that are
    over are closed. A call is over when one that ended before it began is opened:

        outer  |--------------------------------|        an outer layer is over only at the very end:
        inner      |---- a ----|  |---- b ----|          opening a (ended) closes b (began later), never outer
        clock  1   2           3  4           5  6
    """

    calls: list[Call[L]] = field(default_factory=list)
    serial: int = 0  # the later the forward, the higher
    task: int = 0  # the backward (or backward within a backward) that came to it last
    reduces: bool = False  # whether that backward writes gradients of parameters
    walked: bool = False  # a backward has been through it
    _clock: int = 0
    _cursor: int = -1  # the next call to open, from the end; reset by rewind()
    _open: list[Call[L]] = field(default_factory=list)
    _first: dict[L, Call[L]] = field(default_factory=dict)  # layer -> the call that began first: backward closes it last

    def begin(self) -> int:
        self._clock += 1
        return self._clock

    def record(self, layer: L, start: int) -> Call[L]:
        call = Call(layer, start, self.begin(), len(self.calls))
        if layer not in self._first or start < self._first[layer].start:  # it may have called itself
            self._first[layer] = call
        self.calls.append(call)
        self._cursor = call.index
        return call

    def holds(self, layer: L) -> bool:
        return layer in self._first

    def is_open(self, layer: L) -> bool:
        return any(call.layer == layer for call in self._open)

    def advance(self, call: Call[L]) -> Iterator[Step[L]]:
        """The steps that lead to `call` being open."""
        while self._cursor >= call.index:
            following = self.calls[self._cursor]
            self._cursor -= 1
            opening = self._opened(following)  # before others close: a layer called twice running stays fetched
            yield from self._close_those_after(following.end)
            yield opening
        if call.phase is CallPhase.CLOSED:  # a gradient came late, by a path that the forward order did not foretell
            yield self._opened(call)

    def finish(self, *, complete: bool) -> Iterator[Step[L]]:
        """The steps that end a backward. `complete`: also calls that nothing flowed to take part."""
        if complete and self.calls:
            yield from self.advance(self.calls[0])
        yield from self._close_those_after(0)
        self.rewind()

    def rewind(self) -> None:
        """Ready for another backward through the same graph (`retain_graph`)."""
        self.walked = True
        for call in self.calls:
            call.phase = CallPhase.PENDING
        self._open.clear()
        self._cursor = len(self.calls) - 1

    def upcoming(self, depth: int) -> list[L]:
        """The layers that backward opens next, at most `depth`."""
        return [self.calls[i].layer for i in range(self._cursor, max(self._cursor - depth, -1), -1)]

    def signature(self) -> tuple[L, ...]:
        return tuple(call.layer for call in self.calls)

    def _opened(self, call: Call[L]) -> Step[L]:
        call.phase = CallPhase.OPEN
        self._open.append(call)
        return Step(call, opens=True)

    def _close_those_after(self, end: int) -> Iterator[Step[L]]:
        over = sorted((call for call in self._open if call.start > end), key=lambda call: -call.start)
        for call in over:
            self._open.remove(call)
            call.phase = CallPhase.CLOSED
            yield Step(call, opens=False, reduce=self._first[call.layer] is call)
