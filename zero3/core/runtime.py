"""The runtime of one model. It decides when layers are fetched and released in forward, and records
calls for backward.

    forward of layer i     release layer i-1; wait fetch(i); start fetch(i+1); module(x)

Every rank makes the same collectives in the same order, whatever its data is. In forward it is the
order of calls, which ranks have compared. In backward it is the trace of the forward, from its end.
[F1] and the like: "a step, call by call" in docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..comm.communicator import Communicator
from ..comm.log import TransferLog
from .autograd import (
    checkpoint_around,
    graph_clock,
    inside_backward,
    nodes_since,
    tensors_in,
    transforms_under_way,
)
from .backward import Backward, LayerCall, LayerTrace, Reductions
from .collectives import Activity, Agree, CompareLogs, Look, Round
from .full_buffer import Lifetime
from .layer_state import LayerState, Presence
from .schedule import CallStack, CallTrace, ForwardOrder, Frame, LearnedOrder, Order, OwnOrder

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class Pace:
    """How a model's layers go one after another."""

    depth: int  # how many layers are gathered ahead, and how many reductions are under way
    compare_every: int  # transfers, after which ranks compare them
    own_backup_group: bool  # whether reductions have their own communicator
    resident_bytes: int  # of frozen full buffers that stay from step to step


@dataclass(slots=True)
class PresentPass:
    """A forward of the model, under way or over: of one outermost module, or of several in turn."""

    trace: LayerTrace | None = None  # while one of them runs
    last: LayerTrace | None = None  # after it: another one may continue it
    # whether none may, because ranks ran inside `resident` since
    is_over: bool = False
    own_pace: bool = False  # whether it runs inside `resident`
    # layers whose call is over and that are not released yet
    lingering: list[LayerState] = field(default_factory=list)
    # ids of the outermost modules that it has called; references would keep them alive
    called: set[int] = field(default_factory=set)


class Comparisons:
    """When ranks compare the transfers that they have made."""

    def __init__(self, communicator: Communicator, log: TransferLog, every: int) -> None:
        """`every`: so many transfers; 0: never here."""
        self.log = log
        self._communicator, self._every = communicator, every
        self._tells = every > 1 and not communicator.tags_messages
        self._due = every  # the number of transfers at which they are compared

    def look(self, first: LayerState) -> None:
        """At every forward if messages carry no layer's tag, and otherwise after `every`."""
        log, comparison = self.log, CompareLogs(first, self._communicator, self._tells)
        if self._tells:
            log.look(but_last=log.history.behind)
            first.conductor.conduct(comparison)
        # the count keeps the log short, too; at 1 `Comparing` compares before each gather
        elif log.count >= self._due > 1 and first.conductor.conduct(comparison):
            self._due = log.count + self._every


class Runtime:
    def __init__(
        self,
        layers: Sequence[LayerState],
        pace: Pace,
        *,
        ordered: bool,
        own_order: OwnOrder[LayerState] | None,
        called_by: Callable[[nn.Module], Sequence[LayerState]],
        check_toggled: Callable[[LayerState, Iterable[LayerState]], None],
    ) -> None:
        """`ordered`: the layers are called in this order. `own_order`: one that is not learned, by
        which this rank makes the transfers of layers that it leaves out, too.

        `called_by`: the layers that a call of a module may call, or none: then it may call all.
        `check_toggled`: is told a layer that is to compute, some of whose parameters may have
        another `requires_grad` than their chunk, and all layers. It raises if that is wrong.
        """
        first = layers[0]
        self.communicator = first.communicator
        self.replays: dict[object, Any] = {}  # the collectives of micro-batches, for `step_guard`
        self._device = first.device
        self._called_by, self._check_toggled = called_by, check_toggled
        self.stack = CallStack(dict.fromkeys(layers))
        self.layers = self.stack.layers
        self.own_order = own_order
        self._order: Order[LayerState] = own_order or LearnedOrder(
            layers if ordered else (), pace.depth, partial(compare_call, first.communicator)
        )
        self._comparisons = Comparisons(
            first.communicator, first.log, pace.compare_every if own_order is None else 0
        )
        backups = first.communicator.duplicate() if pace.own_backup_group else first.communicator
        self.backward = Backward(
            self.stack,
            first.communicator,
            Reductions(backups, pace.depth),
            makes_the_rest=own_order is not None,
        )
        self._pass, self._passes = PresentPass(), 0
        self._any_stays, self._room = False, pace.resident_bytes
        for state in self.layers:
            self._watch(state)
        self.note_lifetimes()
        first.chunks.lanes.end_before(self)

    @property
    def orders(self) -> tuple[ForwardOrder[Any], ForwardOrder[Any]]:
        """The learned orders of forwards and of backwards."""
        return self._order.calls, self.backward.order

    @property
    def awaits_backward(self) -> bool:
        """Whether the last pass has calls that no backward has reached."""
        return (
            self._pass.last is not None
            and bool(self._pass.last.calls)
            and not self._pass.last.walked
        )

    @property
    def in_forward(self) -> bool:
        return self._pass.trace is not None

    def serves(self, communicator: Communicator, device: torch.device) -> bool:
        return self.communicator.same_ranks(communicator) and self._device == device

    def take_in(self, state: LayerState) -> None:
        """Adds a layer whose inputs come from this runtime's layers."""
        self._order.adopt(state)
        self.layers.append(state)
        self._watch(state)
        self.note_lifetimes()

    def _watch(self, state: LayerState) -> None:
        self.backward.watch(state)
        self._room = state.choose_residents(self._room)
        state.chunks.go_through(self.layers[0].chunks.lanes)
        state.write_into(self.layers[0].log)

    def note_lifetimes(self) -> None:
        """Whether any full buffer stays from step to step: then each forward looks for changes."""
        self._any_stays = any(state.stays(chunk) for state in self.layers for chunk in state.chunks)

    # -- the call of an outermost module

    def begin_pass(self, module: nn.Module) -> bool | None:
        """[F1] A zero3 module is called. None: it is not the outermost one, so a pass is under way.
        Otherwise, whether a forward has begun: a recomputation is none.

        The module continues the last pass, because a plain container may call one layer after
        another. A new pass begins if the module was called in the last pass already, or if a
        backward has ended since.
        """
        if self._pass.trace is not None:
            return None
        if inside_backward():
            self.backward.recompute()
            self._pass.trace = self._new_trace()
            return False
        if self.backward.resting:
            self.backward.resting.go_on()
        first = self.layers[0]
        first.conductor.conduct(Round(first, Activity.FORWARD, begins=True))
        try:
            # all layers that it calls: then ranks may call it at different points, or not at all
            self._pass.own_pace = any(state.pins.resident for state in self.layers) and all(
                state.pins.resident for state in self._called_by(module) or self.layers
            )
            if self._pass.own_pace:
                self._pass.trace = self._new_trace()
            else:
                self._meet_for_pass(module)
        except BaseException as failure:
            first.conductor.conduct(Round(first, Activity.FORWARD, False, failure))
            raise
        return True

    def _meet_for_pass(self, module: nn.Module) -> None:
        before = self._pass.last
        continues = not (
            before is None or before.walked or self._pass.is_over or id(module) in self._pass.called
        )
        if not continues:
            self.reset(broken=False)
        if self._any_stays:
            first = self.layers[0]
            first.conductor.conduct(Look(first, self.layers, self.communicator))
        self._comparisons.look(self.layers[0])
        self._order.begin(continues=continues)
        if continues:
            self._release_lingering(keep=())  # an optimizer may have stepped since the last module
        self._pass.trace = before if continues else self._new_trace()
        self._pass.called.add(id(module))

    def end_pass(self, *, began: bool, error: BaseException | None) -> None:
        """[F5] The outermost module's forward is over, or has raised `error`. `began`: what
        `begin_pass` has returned.
        """
        first = self.layers[0]
        try:
            if error is None:
                self._finish_pass()
            else:
                self._fail_pass(error)
        except BaseException as failure:
            self._pass.trace = self._pass.last = None
            if began:
                first.conductor.conduct(Round(first, Activity.FORWARD, False, failure))
            raise
        if began:
            if self.backward.resting:
                self.backward.resting.settle(before_backward=self.awaits_backward)
            first.conductor.conduct(Round(first, Activity.FORWARD, False, error))

    def _finish_pass(self) -> None:
        if inside_backward() or self._pass.own_pace:
            self._pass.trace = None
            return
        self._order.finish(self.layers[0], self)
        self._pass.last, self._pass.trace = self._pass.trace, None
        self.stack.await_no_calls()
        for state in self.layers:
            if state in self._pass.lingering:
                state.keep()
            elif state.presence is not Presence.RELEASED:
                self.backward.release(state)

    def _fail_pass(self, error: BaseException) -> None:
        if self.own_order is not None and not inside_backward() and not self._pass.own_pace:
            self.own_order.fail(self.layers[0], self, error)
        self._pass.trace = self._pass.last = None

    def _new_trace(self) -> LayerTrace:
        self._passes += 1
        if not inside_backward():
            self._comparisons.log.begin_pass()
        return CallTrace(serial=self._passes)

    def end_continuation(self) -> None:
        """The next outermost module begins a new pass. Every rank calls it before ranks go their
        own ways.
        """
        self._pass.is_over = True

    def reset(self, *, broken: bool = True) -> None:
        """Releases all layers and drops the present pass. See `Backward.reset` for the gradients.

        `broken`: layers that stay whole are released too.
        """
        self._pass = PresentPass()
        if self.own_order is not None:
            self.own_order.forget_pass()
        self.backward.reset(broken=broken)

    # -- the call of a layer

    def pre_forward(self, state: LayerState, given: object) -> None:
        """[F2] Releases the layer of the last call, waits for this layer's parameters, and starts
        to fetch the next layers. `given`: the call's arguments.
        """
        # ranks do not compare: they may differ here
        inside = inside_backward()
        opened = inside and self.backward.open_recomputed(state, self._pass.last)
        resident = state.pins.resident
        if resident or (inside and self.backward.is_recomputing(state)):
            gone = not resident and state.presence not in (Presence.FETCHED, Presence.KEPT)
            state.fetch()
            start = self._pass.trace.begin() if self._pass.trace is not None else 0
            self.stack.frames.append(
                Frame(
                    state,
                    start,
                    graph_clock(),
                    recomputes=True,
                    opened=opened,
                    fetched_here=gone,
                    older=frozenset() if resident else nodes_since(0, tensors_in(given)),
                )
            )
            return
        if self._pass.trace is None:
            raise RuntimeError(
                f"layer {state.label} was called outside a forward pass of its model"
            )
        ahead = self._order.recompute(state) if inside else self._order.enter(state, self)
        self._release_lingering(keep=[state, *ahead])
        state.fetch()
        if state.parameters.toggled:
            self._check_toggled(state, self.layers)
        for following in ahead:
            following.start_fetch()
        self.stack.frames.append(Frame(state, self._pass.trace.begin(), graph_clock()))

    def post_forward(self, state: LayerState, output: Any, kept: Any) -> Any:
        """[F4] Puts hooks on the graph, by which backward finds the layer. The layer is released at
        the next call.

        `kept`: other places where the layer may have left tensors, such as its arguments and its
        modules' attributes.
        """
        frame, trace = self.stack.frames.pop(), self._pass.trace
        if state.pins.resident:
            if not transforms_under_way():  # their graphs end at their own arguments
                self.backward.forbid(state, nodes_since(frame.clock, tensors_in((output, kept))))
            return output
        outputs = tensors_in(output)
        seen = outputs + tensors_in(kept)
        state.check_unwritten()
        state.let_escape(seen)
        nodes = nodes_since(frame.clock, seen)
        if frame.recomputes:
            nodes -= frame.older
            # A reentrant checkpoint walks this graph itself; others drop it. A call around the
            # checkpoint is open: it gets these gradients too, and reduces them once.
            opened = frame.opened or self.backward.has_opened(state)
            if trace is not None and nodes and not opened:
                self.backward.follow(trace, trace.record(state, frame.start), nodes, mark=self)
            if frame.fetched_here:
                self.backward.release(state)
            return output
        if self.own_order is not None:
            self.own_order.leave(state, self)
        if state.behaviour.modules > 1:
            self.stack.count_call(state, state.behaviour.modules)
        # All ranks must record the same calls. A layer's output may be its input on one rank only,
        # so `nodes` can't decide alone.
        takes_part = (
            nodes
            or self._order.counts_every_call
            or state.parameters.may_get_gradients()
            or any(t.requires_grad for t in outputs)
        )
        if not takes_part:
            self.backward.release(state)
        elif (call := self.end_call(state, frame.start)) is not None and trace is not None:
            self.backward.follow(trace, call, nodes, mark=self)
        return output

    def begin_call(self, state: LayerState, ahead: Sequence[LayerState] = ()) -> int:
        """Begins the call of a layer that this rank leaves out, because other ranks may call it."""
        self._release_lingering(keep=[state, *ahead])
        # from here to `end_call` it stays, as a layer does that computes
        self._pass.lingering = [each for each in self._pass.lingering if each is not state]
        state.fetch()
        for following in ahead:
            following.start_fetch()
        if state.behaviour.modules > 1:
            self.stack.count_call(state, state.behaviour.modules)
        return self._pass.trace.begin() if self._pass.trace is not None else 0

    def end_call(self, state: LayerState, start: int) -> LayerCall | None:
        """Records a call for the backward. Without gradients it releases the layer and returns
        None.
        """
        graph = torch.is_grad_enabled()
        if self._pass.trace is None or not (graph or self._order.counts_without_graph):
            self.backward.release(state)
            return None
        self._pass.lingering.append(state)
        recomputed = not graph or self._order.is_recomputed
        call = self._pass.trace.record(state, start, recomputed=recomputed)
        # a recomputation reads them, too, and happens only on ranks where gradients arrive
        if not (
            state.behaviour.reads_weights
            or self.own_order is not None
            or inside_backward()
            or checkpoint_around() is not None
        ):
            call.leave_out_gather()
        return call

    def recorded(self) -> tuple[LayerState, ...]:
        """The layers whose calls are recorded in the forward under way."""
        trace = self._pass.trace
        return () if trace is None else tuple(call.layer for call in trace.calls)

    def unite(self, since: float) -> None:
        """See `CallTrace.unite`."""
        if self._pass.trace is not None:
            self._pass.trace.unite(since)

    @property
    def now(self) -> int:
        return 0 if self._pass.trace is None else self._pass.trace.now

    def note_compared(self) -> None:
        if self._pass.trace is not None:
            self._pass.trace.note_compared()

    def _release_lingering(self, keep: Iterable[LayerState]) -> None:
        kept = set(keep)
        for state in self._pass.lingering:
            if state not in kept and state.behaviour.lifetime < Lifetime.PASS:
                self.backward.release(state)
            elif state not in kept and not self.stack.is_under_way(state) and not inside_backward():
                # hidden, so that another layer's use of its parameters is an error here too
                state.keep()
        self._pass.lingering = [
            state for state in self._pass.lingering if state.presence is not Presence.RELEASED
        ]


@dataclass(eq=False, slots=True)
class ForwardPass:
    """Context around the forward of a zero3 module. At its end the runtime has the same frames as
    before, also after an exception.

    Inside, autocast caches no cast copies of parameters, since they would outlive the full
    parameters.
    """

    _runtime: Runtime
    _module: nn.Module
    _began: bool | None = None
    _depth: int = 0
    _caches: bool = False

    def __enter__(self) -> None:
        self._began = self._runtime.begin_pass(self._module)
        self._depth = len(self._runtime.stack.frames)
        self._caches = torch.is_autocast_cache_enabled()
        if self._caches:
            torch.set_autocast_cache_enabled(False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._caches:
            torch.set_autocast_cache_enabled(True)
        del self._runtime.stack.frames[self._depth :]
        if self._began is not None:
            self._runtime.end_pass(began=self._began, error=error)


def compare_call(communicator: Communicator, state: LayerState, number: int) -> None:
    """Compares the layer that is called as number `number` of a forward."""
    place = f"the layer called as number {number} of a forward"
    state.conductor.conduct(Agree(state, place, (state.name_among_ranks,), communicator))
