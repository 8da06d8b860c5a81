"""One model's backward. It walks over the traces of forwards from their ends, and fetches, backs up
and releases layers.

    backward of layer i    release and back up i+1; wait fetch(i); start fetch(i-1); autograd
    end of backward        wait for all backups; then nothing is fetched or under way

The numbers in comments, such as [B1], are those of "a step, call by call" in docs/design.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.autograd.graph import Node

from ..comm.communicator import Communicator
from .autograd import (
    EndOfBackward,
    accumulates_everywhere,
    backward_task,
    before_gradient_flows,
    inside_backward,
)
from .collectives import Activity, Agree, Reduce, Round, Settle
from .full_buffer import Lifetime
from .layer_gradients import Deferral, LayerGradients
from .layer_state import LayerState, Presence, RestingLayers, accounts_of, ignored_of
from .schedule import Call, CallPhase, CallStack, CallTrace, ForwardOrder, Step
from .ticket import Ticket

__all__: list[str] = []

_BACKWARD = "the layers that take part in backward"

LayerTrace = CallTrace[LayerState]
LayerCall = Call[LayerState]


class Reductions:
    """A model's reductions under way."""

    def __init__(self, communicator: Communicator, depth: int) -> None:
        """`depth`: how many are under way at most, but for one. It is that of the model's pace."""
        self._communicator, self.depth = communicator, depth
        self.under_way: deque[Ticket] = deque()
        # those whose first leg is over: sums over replicas, copies to the host
        self.later: deque[Ticket] = deque()
        self.go_on = False  # see `going_on`

    def start(self, state: LayerState, *, absent: bool = False) -> None:
        """Starts to reduce a layer's gradients. `absent`: this rank has none, and takes part in
        what others conduct.
        """
        while len(self.under_way) >= max(1, self.depth):
            self._wait_for_one()
        with state.spans.backup:
            prepared = state.gradients.prepare(self._communicator)
            reduction = Reduce(state, not state.gradients.may_reduce, self, prepared)
            tickets = reduction.perform() if absent else state.conductor.conduct(reduction)
            self.under_way.extend(tickets)

    def _wait_for_one(self) -> None:
        oldest = self.under_way.popleft()
        if oldest.advance():
            self.later.append(oldest)

    def settle(self, first: LayerState) -> None:
        """Waits for all of them, together with other ranks. `first`: of the model's layers."""
        while self.under_way:
            self._wait_for_one()
        if self.later:
            first.conductor.conduct(Settle(first, self))

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Context for a `reset` after which this rank makes the rest of a failed backward's
        transfers.

        Those under way go on, because a wait for them may need the other ranks' waits, which come
        later. Layers that stay whole stay so, because the other ranks don't gather them again.
        """
        under_way = self.under_way, self.later
        self.under_way, self.later, self.go_on = deque(), deque(), True
        try:
            yield
        finally:
            (self.under_way, self.later), self.go_on = under_way, False

    def drain(self) -> None:
        """Waits for all of them."""
        while self.under_way:
            self._wait_for_one()
        while self.later:
            oldest = self.later.popleft()
            if oldest.advance():
                self.later.append(oldest)


class Reach:
    """How far gradients of the present backward go."""

    def __init__(self) -> None:
        self.only: frozenset[LayerState] | None = None  # the layers that it is for, if not all
        self._began_for: frozenset[LayerState] | None = None
        self._began_as: list[tuple[LayerGradients, Deferral]] = []

    @contextmanager
    def for_some(self, states: Iterable[LayerState]) -> Iterator[None]:
        """Context in which backwards are for the gradients of these layers alone."""
        self.only = frozenset(states)
        try:
            yield
        finally:
            self.only = None

    def begin(self, states: Iterable[LayerState]) -> None:
        self._began_for = self.only
        self._began_as = [(state.gradients, state.gradients.deferral) for state in states]

    @contextmanager
    def as_it_began(self) -> Iterator[None]:
        """Context in which they go as far as they did then."""
        only, self.only = self.only, self._began_for
        now = [(gradients, gradients.defer_as(then)) for gradients, then in self._began_as]
        try:
            yield
        finally:
            self.only = only
            for gradients, deferral in now:
                gradients.defer_as(deferral)


class Backward:
    """Moves a model's layers through a backward. Hooks on the graph call it, in any order."""

    def __init__(
        self,
        stack: CallStack[LayerState],
        communicator: Communicator,
        reductions: Reductions,
        *,
        makes_the_rest: bool,
    ) -> None:
        """`makes_the_rest`: a rank whose backward raised makes its transfers to the end, because
        ranks that leave out different layers were at different ones.
        """
        # layers, and gradients' fates
        self.order: ForwardOrder[tuple[tuple[LayerState, ...], tuple[str, ...]]] = ForwardOrder()
        self._stack = stack
        self._communicator = communicator
        self.reductions = reductions
        self._makes_the_rest = makes_the_rest
        self._touched: list[LayerTrace] = []  # the traces that this backward has reached
        self.resting = RestingLayers()
        self._ignoring: list[LayerState] = []  # the layers with parameters that are left alone
        self.reach = Reach()
        self._reduces = False  # whether this backward reduces gradients; `autograd.grad` does not
        self.owes = False  # whether gradients were ever kept for later (`no_sync`, stage 1)
        self._told = False  # whether the conductor knows that this backward has begun
        self.ending = EndOfBackward()  # the end of the present backward
        # the end of a backward that runs others inside (reentrant checkpointing)
        self._outer_ending = EndOfBackward()

    def watch(self, state: LayerState) -> None:
        """Adds a layer: from now on, any gradient that it gets is reduced by the end of the
        backward.
        """
        state.gradients.tell(self)
        self.resting.watch(state)
        if state.gradients.ignored:
            self._ignoring.append(state)

    def follow(
        self, trace: LayerTrace, call: LayerCall, nodes: Iterable[Node], mark: object
    ) -> None:
        """From now on, a gradient that flows into `nodes` opens `call` first."""
        before_gradient_flows(nodes, partial(self._before, trace, call), mark)

    def forbid(self, state: LayerState, nodes: Iterable[Node]) -> None:
        """A gradient that flows into `nodes`, which were computed while the layer was resident, is
        an error.
        """
        label = state.label

        def refuse(gradients: object) -> None:
            raise RuntimeError(
                f"backward through layer {label}, whose forward ran inside zero3.resident(model): "
                "ranks may have made different forwards there, so gradients can't be reduced. "
                "Run what you train outside of it."
            )

        before_gradient_flows(nodes, refuse, mark=self)

    @property
    def layers(self) -> list[LayerState]:
        return self._stack.layers

    def owe(self) -> None:
        """Gradients are kept for later."""
        self.owes = True

    @property
    def raised(self) -> bool:
        """Whether the last backward has raised, and what it has left is still there."""
        return self.ending.missed or self._outer_ending.missed

    def is_recomputing(self, state: LayerState) -> bool:
        """Whether a forward of `state` is now a checkpoint's recomputation of a call on one of this
        backward's traces.
        """
        return self.ending.awaited and any(trace.holds(state) for trace in self._touched)

    def has_opened(self, state: LayerState) -> bool:
        """Whether a call of `state` is open: gradients that it gets now are reduced after it."""
        return any(trace.has_opened(state) for trace in self._touched)

    def release(self, state: LayerState) -> None:
        """Releases `state`, unless one of its calls is under way. Keeps it for its other modules'
        calls. What stays from step to step does so (stages 1, 2, `resident_bytes`).
        """
        stack = self._stack
        if state.presence is Presence.RELEASED or (stack.frames and stack.is_under_way(state)):
            return
        for trace in self._touched:
            if trace.is_open(state):
                return
        awaited = state.behaviour.modules > 1 and self._stack.awaits_calls(state)
        if awaited and state.presence is not Presence.FETCHING:
            state.keep()
        else:
            state.release(Lifetime.PASS)

    def recompute(self) -> None:
        """Called before a recomputation. Under reentrant checkpointing the recomputed layers get a
        backward inside this one.
        """
        self._tell_conductor()
        if not self.ending.awaited and not self._outer_ending.awaited:
            self._outer_ending.wait(then=self._end_recomputing)
        self._finish_nested()

    def open_recomputed(self, state: LayerState, last: LayerTrace | None) -> bool:
        """Opens the call of `state` that is recomputed now, or the last one that is recomputed with
        it, before a hook on a graph does it, or because none can. Returns whether there is one.
        `last`: the last forward's trace.
        """
        for trace in dict.fromkeys([*self._touched, *([] if last is None else [last])]):
            for call in reversed(trace.recomputed):
                together = [trace.calls[number] for number in call.together] or [call]
                if call.layer is state and any(
                    each.phase is not CallPhase.CLOSED for each in together
                ):
                    if together[-1].phase is CallPhase.PENDING:
                        with torch.no_grad():
                            self._before(trace, together[-1])
                    return True
        return False

    def _finish_nested(self) -> None:
        """Ends the walks of backwards inside this one that are over (reentrant checkpointing)."""
        task = backward_task()
        for trace in (*self._touched,):
            if trace.task > task:
                self._finish(trace)

    def reset(self, *, broken: bool = False) -> None:
        """Releases all layers. If the last backward raised, all gradients are dropped; in a
        transaction, only that backward's.
        """
        broken_backward = self.ending.missed or self._outer_ending.missed
        for account in accounts_of(self._stack.layers) if broken_backward else ():
            account.drop_what_lands()
        if broken_backward and self._makes_the_rest:
            try:
                self._make_the_rest()
            except RuntimeError:  # a transfer has failed
                broken = True
        while self.reductions.under_way or self.reductions.later:
            try:
                self.reductions.drain()
            except RuntimeError:  # after a failed transfer there is nothing more to wait for
                broken_backward = True
        for trace in self._touched:
            trace.rewind()
        self._touched.clear()
        self._stack.frames.clear()
        self._stack.await_no_calls()
        self._reduces = self._told = False
        for state in self._stack.layers:
            state.reset(broken=(broken or broken_backward) and not self.reductions.go_on)
        if self.resting and broken_backward:
            self.resting.settle()  # its end has not
        for account in accounts_of(self._stack.layers) if broken_backward else ():
            account.give_up()
        for ignored in ignored_of(self._ignoring) if broken_backward else ():
            ignored.give_up()
        self.ending.forget()  # not before: if this was interrupted, the next reset begins anew
        if self._outer_ending.missed:
            self._outer_ending.forget()
        if self.owes:
            self.forget_zeroed()

    def _make_the_rest(self) -> None:
        """Makes the transfers up to the end of a backward that raised: ranks that leave out
        different layers were at different ones. Gradients go as far as when it began, because the
        caller may have left its `no_sync` since, or entered one.

        The log notes it: if the backward has not raised on all ranks, they all raise at the end of
        the next forward.
        """
        with self.reach.as_it_began():
            self._finish_all()
        self.layers[0].log.note("dropping", "a backward that raised")

    def forget_zeroed(self) -> None:
        """Drops kept gradients if the caller has zeroed the chunks' since. Chunks of which this
        rank has no part follow the others.
        """
        if not self.owes:
            return
        accounts = accounts_of(self._stack.layers)
        zeroed = [account for account in accounts if account.forget_zeroed()]
        for account in accounts if zeroed else ():
            if account.unseen:
                account.drop()

    # -- the walk

    def begin(self) -> None:
        """[B1] Called by the first hook of a backward. This may be the hook of a parameter used
        outside the layers' calls.
        """
        if self.ending.awaited or not inside_backward():
            return
        if self.ending.missed:
            self.reset()
        self._tell_conductor()  # it may refuse: then this backward has left nothing
        if self.owes:
            self.forget_zeroed()
        for state in self._ignoring:
            state.gradients.begin_backward()
        if self.resting:
            self.resting.go_on()
        if self._makes_the_rest:
            self.reach.begin(self._stack.layers)
        self.ending.wait(then=self._end)
        self.order.begin()

    def _tell_conductor(self, *, begins: bool = True) -> None:
        if self._told != begins:
            first = self._stack.layers[0]
            first.conductor.conduct(Round(first, Activity.BACKWARD, begins))
            self._told = begins

    def _before(self, trace: LayerTrace, call: LayerCall, gradients: object = None) -> None:
        """[B2] A gradient is about to flow into the graph of `call`."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True through layer {call.layer.label}: the graph of the gradients "
                "would use the layer's weights after they are released. Double backward is not "
                "supported; compute such a term on an unsharded model."
            )
        self.begin()
        self._finish_nested()
        if self._touched != [trace]:
            for newer in [each for each in self._touched if each.serial > trace.serial]:
                self._finish(newer)
            if trace not in self._touched:
                self._touch(trace)
        for step in trace.advance(call):
            self._take(step, trace)

    def _touch(self, trace: LayerTrace) -> None:
        signature, only = tuple(call.layer for call in trace.calls), self.reach.only
        reductions = tuple(
            (
                call.layer.gradients.fate
                if only is None or call.layer in only
                else "gradients left alone (inputs=)"
            )
            + ("" if call.gathers else ", parameters not gathered")
            for call in trace.calls
        )
        # what ranks have compared when the forward was over need not be the same as before
        fates = tuple(sorted(set(reductions)))
        if not self.order.advance(((), fates) if trace.compared else (signature, reductions)):
            names = tuple(
                f"{state.name_among_ranks}, {how}"
                for state, how in zip(signature, reductions, strict=True)
            )
            first = signature[0]
            first.conductor.conduct(Agree(first, _BACKWARD, names, self._communicator))
        # `autograd.grad` may compute no parameter's gradient: then nothing is reduced
        reduces = accumulates_everywhere() or any(
            state.gradients.expected() for state in dict.fromkeys(reversed(signature))
        )
        self._reduces = self._reduces or reduces
        trace.reached_by(backward_task(), reduces=reduces)
        self._touched.append(trace)

    def _take(self, step: Step[LayerState], trace: LayerTrace) -> None:
        state = step.call.layer
        if step.opens:  # [B3]
            state.fetch(gathers=step.call.gathers)
            for following in [*step.call.layers, *trace.upcoming(self.reductions.depth)]:
                following.start_fetch()
            return
        # an optimizer that steps in parameters' hooks would change nothing but the full buffer
        state.check_unwritten()
        if state.behaviour.modules > 1:
            self._stack.await_calls(state, 0 if step.reduce else state.behaviour.modules - 1)
        # first: the buffer of its gradients may take its full buffer's memory
        for each in (state, *step.call.layers):
            self.release(each)
        only = self.reach.only
        if step.reduce and trace.reduces and (only is None or state in only):
            self._back_up(state)

    def _finish(self, trace: LayerTrace) -> None:
        for step in trace.finish(complete=trace.reduces):
            self._take(step, trace)
        self._touched.remove(trace)

    def _back_up(self, state: LayerState, *, whole: bool = False) -> None:
        """[B5] Reduces a layer's gradients, or keeps them if reductions are deferred. `whole`:
        reduces kept ones even then.
        """
        if state.gradients.deferred and not whole:
            self.owe()
            state.gradients.keep()
            return
        self.reductions.start(state)
        if not self.reductions.depth:
            self.reductions.settle(self._stack.layers[0])

    def reduce_deferred(self) -> None:
        """Reduces all kept gradients, on every rank. At stage 1, the first read of a gradient calls
        it.
        """
        if inside_backward():
            raise RuntimeError(
                "with stage=1 gradients are reduced after backward: don't look at them in hooks"
            )
        self.forget_zeroed()
        tokens = [
            (account, account.noted_tokens())
            for account in accounts_of(self._stack.layers)
            if account.owed
        ]
        for state in self._stack.layers:
            if state.gradients.owed():
                self._back_up(state, whole=True)
        self.reductions.settle(self._stack.layers[0])
        for account in accounts_of(self._stack.layers):
            if account.unreached.maybe:
                account.settle()
        # the reduction adds no new gradients, so the number of tokens stays the same
        for account, total in tokens:
            if total is not None:
                account.note_tokens(total)

    def _finish_all(self) -> None:
        for trace in sorted(self._touched, key=lambda trace: -trace.serial):
            self._finish(trace)
        only = self.reach.only
        for state in self._stack.layers:
            if state.gradients.pending() or (
                self.owes
                and self._reduces
                and state.gradients.due()
                and (only is None or state in only)
            ):
                self._back_up(state)
        self.reductions.settle(self._stack.layers[0])

    def _end(self) -> None:
        """[B6] Every layer's gradients are reduced, every layer is released, nothing is in
        flight.
        """
        self._finish_all()
        self._reduces = False
        self._stack.await_no_calls()
        for state in self._stack.layers:
            self.release(state)
        if self.resting:
            self.resting.settle()
        self.order.learn()
        self._tell_conductor(begins=False) if self._outer_ending.awaited else self._end_outer()

    def _end_recomputing(self) -> None:
        if not self.ending.awaited:  # otherwise reductions are still under way, and `_end` comes
            self._end_outer()

    def _end_outer(self) -> None:
        for state in self._stack.layers:
            state.gradients.end_backward()
        self._tell_conductor(begins=False)
