"""profile(): how long each layer computes, and how long the computation waits for its transfers.

A step outside the context pays nothing. Inside the context, the methods that start and await
transfers are replaced on the model's own objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..access import states_of
from ..comm.errors import NamingFailures
from ..comm.streams import Clock, Lane, Lanes, Pending, clock_for
from ..core.autograd import inside_backward
from ..core.chunk import Chunk
from ..core.layer_state import LayerState
from ..layer import layers_of
from ..policy import gradient_dtype
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
    recorder.fill(result, states[0].policy.prefetch_depth)


@dataclass(eq=False, slots=True)
class _Timed:
    """A transfer, and its moments by the clock. The attributes are those of `Transfer`."""

    layer: str
    kind: Kind
    phase: Phase
    nbytes: int
    begin: object
    end: object = None
    stopped: object = None
    resumed: object = None


class _TimedLane:
    """A lane that records when the transfers of one layer begin and end."""

    def __init__(
        self, lane: Lane, recorder: _Recorder, state: LayerState, kind: Kind, sizes: Iterator[int]
    ) -> None:
        self._lane = lane
        self._recorder = recorder
        self._state = state
        self._kind = kind
        self._sizes = sizes  # the bytes of each transfer that follows

    @contextmanager
    def issue(self) -> Iterator[None]:
        with self._lane.issue():
            phase, begin = _phase(), self._recorder.clock.now()
            self._timed = _Timed(
                self._state.subject.name, self._kind, phase, next(self._sizes), begin
            )
            yield

    def complete(self, pending: Pending, then: Callable[[], None] | None = None) -> Pending:
        mark, clock = self._lane.complete(pending, then), self._recorder.clock
        if clock.on_lanes:
            self._timed.end = clock.now()
        return _TimedMark(mark, self._timed, self._recorder)

    def defer(self, begin: Callable[[], Pending]) -> Pending:
        return self._lane.defer(begin)

    def begin_deferred(self) -> None:
        self._lane.begin_deferred()


class _TimedMark:
    def __init__(self, mark: Pending, timed: _Timed, recorder: _Recorder) -> None:
        self._mark = mark
        self._timed = timed
        self._recorder = recorder

    def wait(self) -> None:
        timed, clock = self._timed, self._recorder.clock
        if timed.resumed is not None:
            self._mark.wait()
            return
        stopped = clock.now()
        self._mark.wait()
        timed.stopped, timed.resumed = stopped, clock.now()
        timed.end = timed.end or timed.resumed
        if timed.nbytes:
            self._recorder.transfers.append(timed)


class _Recorder:
    """Records computation and transfers. Computation counts for the layer that was fetched last,
    until that layer's call is over.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.transfers: list[_Timed] = []
        self._spans: list[tuple[str, Phase, object, object]] = []
        self._running: tuple[str, Phase, object] | None = None
        # the layers whose forwards are under way, outer before inner
        self._forwards: list[str] = []
        self._undo: list[Callable[[], object]] = []
        self._start: object = None
        self._stop: object = None

    # -- begin and end

    def attach(self, model: nn.Module, states: list[LayerState]) -> None:
        for state in states:
            self._replace(state, "fetch", partial(self._fetch, state, state.fetch))
            self._replace(
                state.gradients, "prepare", partial(self._prepare, state.gradients.prepare)
            )
            self._replace(
                state.gradients, "back_up", partial(self._back_up, state, state.gradients.back_up)
            )
            for chunk in state.chunks:
                self._replace(
                    chunk,
                    "start_fetch",
                    partial(self._start_fetch, state, chunk, chunk.start_fetch),
                )
        for layer in layers_of(model):
            self._undo.append(layer.register_forward_hook(self._leave, always_call=True).remove)
        self._undo.append(model.register_forward_hook(self._forward_over, always_call=True).remove)
        self._start = self.clock.now()

    def _replace(self, owner: object, method: str, replacement: Callable[..., Any]) -> None:
        if method in vars(owner):
            raise RuntimeError(
                "this model is being profiled already: leave the other zero3.profile first"
            )
        vars(owner)[method] = replacement
        self._undo.append(partial(vars(owner).pop, method))

    def detach(self) -> None:
        self._close()
        self._stop = self.clock.now()
        while self._undo:
            self._undo.pop()()

    def fill(self, result: Profile, prefetch_depth: int) -> None:
        def at(moment: object) -> float:
            return self.clock.seconds(self._start, moment)

        spans = [Span(layer, phase, at(begin), at(end)) for layer, phase, begin, end in self._spans]
        transfers = [
            Transfer(
                t.layer,
                t.kind,
                t.phase,
                t.nbytes,
                at(t.begin),
                at(t.end),
                at(t.stopped),
                at(t.resumed),
            )
            for t in self.transfers
        ]
        result._finish(at(self._stop), spans, transfers, prefetch_depth)

    # -- replacements of methods

    def _fetch(self, state: LayerState, fetch: Callable[[], None]) -> None:
        self._close()
        fetch()
        name, phase = state.subject.name, _phase()
        if phase == "forward":
            self._forwards.append(name)
        self._open(name, phase)

    def _start_fetch(
        self,
        state: LayerState,
        chunk: Chunk,
        start_fetch: Callable[..., None],
        lane: Lane,
        names: NamingFailures,
    ) -> None:
        nbytes = _received(chunk, chunk.compute_dtype.itemsize)
        start_fetch(_TimedLane(lane, self, state, "fetch", iter([nbytes])), names)

    def _prepare(self, prepare: Callable[..., Any], communicator: object) -> Any:
        self._close()
        return prepare(communicator)

    def _back_up(
        self,
        state: LayerState,
        back_up: Callable[..., Any],
        prepared: Any,
        lanes: Lanes,
    ) -> Any:
        trained = [chunk for chunk in state.chunks if chunk.shard.requires_grad]
        widths = [gradient_dtype(state.policy, chunk.shard.dtype).itemsize for chunk in trained]
        sizes = [_received(chunk, width) for chunk, width in zip(trained, widths, strict=True)]
        timed = lanes._replace(backup=_TimedLane(lanes.backup, self, state, "backup", iter(sizes)))
        if lanes.replicas is not None:
            replicas = state.communicator.world_size // state.communicator.shards
            sums = [
                2 * chunk.shard.numel() * width * (replicas - 1) // replicas
                for chunk, width in zip(trained, widths, strict=True)
            ]
            timed = timed._replace(
                replicas=_TimedLane(lanes.replicas, self, state, "backup", iter(sums))
            )
        return back_up(prepared, timed)

    # -- forward hooks

    def _leave(self, *_: object) -> None:
        if not inside_backward():
            self._close()
            if self._forwards:
                self._forwards.pop()
            if self._forwards:
                self._open(self._forwards[-1], "forward")

    def _forward_over(self, *_: object) -> None:
        if not inside_backward():
            self._close()
            self._forwards.clear()

    # -- spans of computation

    def _open(self, name: str, phase: Phase) -> None:
        self._running = (name, phase, self.clock.now())

    def _close(self) -> None:
        if self._running is not None:
            self._spans.append((*self._running, self.clock.now()))
            self._running = None


def _phase() -> Phase:
    return "backward" if inside_backward() else "forward"


def _received(chunk: Chunk, itemsize: int) -> int:
    """The bytes that a rank receives in a gather or a reduction: the full buffer without the rank's
    own slice.
    """
    return (chunk.layout.padded_numel - chunk.shard.numel()) * itemsize
