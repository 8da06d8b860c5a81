"""profile(): how long each layer computes, and how long the computation waits for its transfers.

A step outside the context pays nothing. Inside it, a conductor sees what each layer does, and lanes
that wrap the layers' own see its transfers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from ..access import states_of
from ..comm.streams import Clock, Lane, Lanes, Pending, clock_for
from ..core.autograd import inside_backward
from ..core.chunk import Chunk, Placement
from ..core.collectives import Collective, Conductor, Fetch, Gather, Reduce, chain
from ..core.layer_state import LayerState
from ..experts.at_home import Trip, Way, rows_of
from ..layer import layers_of, state_behind
from ..policy import gradient_dtype
from ..sequences.exchange import Exchange
from ..towers.gates import Gate
from ..wires.coded import Coded, CodedReduceScatter
from .timeline import Kind, Phase, Profile, Span, Transfer

__all__: list[str] = []


@contextmanager
def profile(model: nn.Module) -> Iterator[Profile]:
    """Context that times the steps of a model: how long each layer computed, and how long it was
    waited for.

    Every rank may enter it by itself: no collectives are added. On CUDA times are those of the
    streams, by events, and the host waits at the end only. On the CPU the end of a transfer is seen
    when somebody waits for it. (torch.profiler needs no context: every fetch, wait, forward, backup
    and release has a name in its traces, such as "zero3::fetch layer 'h.3' (Block)".)

    Args:
        model: A sharded model, or a part of one.

    Yields:
        A `Profile`, which is complete when the context is left.

    Raises:
        ValueError: Nothing in `model` is sharded.
        RuntimeError: `model` is being profiled already.

    Example::

        with zero3.profile(model) as found:
            for batch in batches:
                loss_of(model, batch).backward()
        print(found)
        found.draw(f"{directory}/step.png")
    """
    states = states_of(model)
    recorder = _Recorder(clock_for(states[0].device))
    result = Profile()
    try:
        recorder.attach(model, states)
        yield result
    finally:
        recorder.detach()
    recorder.fill(result, _names_of(model, states), states[0].policy.prefetch_depth)


@dataclass(eq=False, slots=True)
class _Moving:
    """A transfer, and its moments by the clock. The attributes are those of `Transfer`."""

    layer: LayerState | None  # None: of a read, which is not told
    kind: Kind
    phase: Phase
    nbytes: int
    begin: object
    end: object = None
    stopped: object = None
    resumed: object = None


class _Now(NamedTuple):
    """What is conducted now."""

    layer: LayerState | None
    kind: Kind
    sizes: dict[str, Iterator[int]]  # of each of its transfers that follows, by lane


class _TimedLane:
    """A lane that records when the transfers of one layer begin and end."""

    def __init__(self, name: str, lane: Lane, recorder: _Recorder) -> None:
        self.inner, self._name, self._recorder = lane, name, recorder

    @contextmanager
    def issue(self) -> Iterator[None]:
        with self.inner.issue():
            self._timed = self._recorder.begin_transfer(self._name)
            yield

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Pending:
        timed, recorder, clock = self._timed, self._recorder, self._recorder.clock
        if then is not None:  # it may begin the next leg, whenever it is waited for
            then = partial(recorder.during, recorder.now, then)
        mark = self.inner.complete(pending, then)
        if clock.on_lanes:
            timed.end = clock.now()
        return _TimedMark(mark, timed, recorder)

    def defer(self, begin: Callable[[], Pending]) -> Pending:
        return self.inner.defer(partial(self._recorder.during, self._recorder.now, begin))

    def begin_deferred(self) -> None:
        self.inner.begin_deferred()


class _TimedMark:
    def __init__(self, mark: Pending, timed: _Moving, recorder: _Recorder) -> None:
        self._mark, self._timed, self._recorder = mark, timed, recorder

    def wait(self) -> None:
        timed, clock = self._timed, self._recorder.clock
        if timed.resumed is not None or not timed.nbytes:
            self._mark.wait()
            return
        with self._recorder.standstill():
            stopped = clock.now()
            self._mark.wait()
            timed.stopped, timed.resumed = stopped, clock.now()
        timed.end = timed.end or timed.resumed
        self._recorder.transfers.append(timed)


class _Timed:
    """Tells the recorder what the layer does."""

    def __init__(self, recorder: _Recorder, inner: Conductor) -> None:
        self._recorder, self.inner = recorder, inner

    def conduct(self, what: Collective, *, absent: bool = False) -> Any:
        recorder, now = self._recorder, None
        if isinstance(what, Exchange):
            return recorder.exchange(what, partial(self.inner.conduct, what, absent=absent))
        if isinstance(what, Fetch | Reduce):
            recorder.close()
        if isinstance(what, Gather):
            now = _Now(what.layer, "fetch", {"fetch": iter(_gathered(what.layer))})
        elif isinstance(what, Reduce):
            now = _Now(what.layer, "backup", _reduced(what.layer))
        begin = time.perf_counter()
        result = recorder.during(now, partial(self.inner.conduct, what, absent=absent))
        if isinstance(what, Gate):
            recorder.gates.append(time.perf_counter() - begin)
        elif isinstance(what, Fetch):
            recorder.computes(what.layer)
        elif isinstance(what, Trip) and what.way is Way.COUNTS and not absent:
            recorder.count_rows(what.layer, *map(rows_of, result))
        return result


class _Recorder:
    """Computation counts for the layer that was fetched last, until that layer's call is over."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.transfers: list[_Moving] = []
        self.gates: list[float] = []  # seconds
        self.now: _Now | None = None
        self._spans: list[tuple[LayerState, Phase, object, object]] = []
        self._running: tuple[LayerState, Phase, object] | None = None
        # the layers whose forwards are under way, outer before inner
        self._forwards: list[LayerState] = []
        self._undo = ExitStack()
        self._start: object = None
        self._stop: object = None
        # of each layer with experts at home: this rank's rows that went to each rank, and how many
        # came from all
        self._rows: dict[LayerState, list[int]] = {}
        self._came = Counter[LayerState]()

    # -- begin and end

    def attach(self, model: nn.Module, states: list[LayerState]) -> None:
        for state in states:
            if any(isinstance(each, _Timed) for each in chain(state.conductor)):
                raise RuntimeError(
                    "this model is being profiled already: leave the other zero3.profile first"
                )
        for state in states:
            timed = _Timed(self, state.conductor)
            state.conducted_by(timed)
            self._undo.callback(state.no_longer_by, timed)
        lanes = {id(state.chunks.lanes): self._timed_lanes(state.chunks.lanes) for state in states}
        for state in states:
            state.chunks.go_through(lanes[id(state.chunks.lanes)])
            self._undo.callback(_untime, state)
        hooks = [(layer, self._leave) for layer in layers_of(model)] + [(model, self._forward_over)]
        for module, hook in hooks:
            self._undo.callback(module.register_forward_hook(hook, always_call=True).remove)
        self._start = self.clock.now()

    def _timed_lanes(self, lanes: Lanes) -> Lanes:
        timed = {
            name: _TimedLane(name, lane, self)
            for name, lane in lanes._asdict().items()
            if lane is not None
        }
        return lanes._replace(**timed)

    def detach(self) -> None:
        self.close()
        self._stop = self.clock.now()
        self._undo.close()

    def fill(
        self, result: Profile, names: Mapping[LayerState | None, str], prefetch_depth: int
    ) -> None:
        def at(moment: object) -> float:
            return self.clock.seconds(self._start, moment)

        spans = [Span(names[layer], phase, at(b), at(e)) for layer, phase, b, e in self._spans]
        transfers = []
        for t in self.transfers:
            moments = map(at, (t.begin, t.end, t.stopped, t.resumed))
            transfers.append(Transfer(names[t.layer], t.kind, t.phase, t.nbytes, *moments))
        for layer, rows in self._rows.items():
            if sent := sum(rows):
                result.busiest[names[layer]] = max(rows) * len(rows) / sent
                result.loads[names[layer]] = self._came[layer] / sent
        result.gates.extend(self.gates)
        result._finish(at(self._stop), spans, transfers, prefetch_depth)

    # -- what the conductor tells

    def computes(self, layer: LayerState) -> None:
        """From now on, this layer does."""
        phase = _phase()
        if phase == "forward":
            self._forwards.append(layer)
        self._open(layer, phase)

    def during(self, now: _Now | None, perform: Callable[[], Any]) -> Any:
        before, self.now = self.now, now
        try:
            return perform()
        finally:
            self.now = before

    def exchange(self, what: Exchange, perform: Callable[[], Any]) -> Any:
        layer = what.layer if self._running is None else self._running[0]
        with self.standstill():
            begin = self.clock.now()
            result = perform()
            end = self.clock.now()
        self.transfers.append(
            _Moving(layer, "exchange", _phase(), what.received, begin, end, begin, end)
        )
        return result

    def count_rows(self, layer: LayerState, rows: list[int], came: list[int]) -> None:
        """So many rows of tokens go to the ranks that have experts, and come from them."""
        self._came[layer] += sum(came)
        before = self._rows.setdefault(layer, [0] * len(rows))
        self._rows[layer] = [count + more for count, more in zip(before, rows, strict=True)]

    def begin_transfer(self, lane: str) -> _Moving:
        now = self.now or _Now(None, "fetch", {})  # of a read, which is not told
        nbytes = next(now.sizes.get(lane, iter(())), 0)
        return _Moving(now.layer, now.kind, _phase(), nbytes, self.clock.now())

    # -- forward hooks

    def _leave(self, *_: object) -> None:
        if not inside_backward():
            self.close()
            if self._forwards:
                self._forwards.pop()
            if self._forwards:
                self._open(self._forwards[-1], "forward")

    def _forward_over(self, *_: object) -> None:
        if not inside_backward():
            self.close()
            self._forwards.clear()

    # -- spans of computation

    def _open(self, layer: LayerState, phase: Phase) -> None:
        self._running = (layer, phase, self.clock.now())

    @contextmanager
    def standstill(self) -> Iterator[None]:
        """Whoever computes waits."""
        running = self._running
        self.close()
        yield
        if running is not None:
            self._open(*running[:2])

    def close(self) -> None:
        if self._running is not None:
            self._spans.append((*self._running, self.clock.now()))
            self._running = None


def _phase() -> Phase:
    return "backward" if inside_backward() else "forward"


def _untime(state: LayerState) -> None:
    """Lanes as they were, of all layers that share them with this one. A runtime may have been made
    meanwhile, or have taken in others.
    """
    backward = state.gradients.backward()
    for each in [state] if backward is None else backward.layers:
        lanes = each.chunks.lanes
        timed = {n: lane for n, lane in lanes._asdict().items() if isinstance(lane, _TimedLane)}
        each.chunks.go_through(lanes._replace(**{n: lane.inner for n, lane in timed.items()}))


def _names_of(model: nn.Module, states: list[LayerState]) -> dict[LayerState | None, str]:
    """The layers' names. Where several have the same, their places in `model` are added."""
    places: dict[LayerState, str] = {}
    for place, module in model.named_modules():
        if (state := state_behind(module)) is not None:
            places.setdefault(state, place)
    count = Counter(state.subject.name for state in states)
    return {
        state: f"{name} at {places[state]!r}" if count[name] > 1 and places.get(state) else name
        for state in states
        for name in [state.subject.name]
    }


def _gathered(layer: LayerState) -> list[int]:
    """The bytes of each of the layer's gathers."""
    missing = [c for c in layer.chunks if not c.full.filled and not c.resident]
    return [
        chunk.gathering.wire.rows.nbytes - chunk.gathering.wire.rows[chunk.index].nbytes
        if isinstance(chunk.gathering.wire, Coded) and chunk.gathering.wire.rounds(chunk)
        # `full_params` gathers all values, in their own dtype
        else _received(chunk, chunk.gathering.among, chunk.full.tensor.dtype.itemsize)
        for chunk in missing
    ]


def _reduced(layer: LayerState) -> dict[str, Iterator[int]]:
    """The bytes of each of its reductions, and of each sum over replicas."""
    replicas = layer.communicator.world_size // layer.communicator.shards
    trained = [
        (chunk, account.flow.stages[0], gradient_dtype(layer.policy, chunk.compute_dtype).itemsize)
        for chunk, account in layer.gradients.accounts.items()
        if chunk.shard.requires_grad
    ]
    # what came in a format was summed in float32
    sums = (4 if isinstance(stage, CodedReduceScatter) else width for _, stage, width in trained)
    return {
        "backup": (
            (chunk.at.layout.world_size - 1) * stage.rows[chunk.index].nbytes
            if isinstance(stage, CodedReduceScatter)
            else _received(chunk, chunk.at, width)
            for chunk, stage, width in trained
        ),
        "replicas": (
            2 * chunk.shard.numel() * width * (replicas - 1) // replicas
            for (chunk, *_), width in zip(trained, sums, strict=True)
        ),
    }


def _received(chunk: Chunk, among: Placement, itemsize: int) -> int:
    """The bytes that a rank receives: the full buffer without its own slice."""
    return (among.layout.padded_numel - chunk.shard.numel()) * itemsize
