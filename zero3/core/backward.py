"""One model's backward: walks the tapes of its forwards from their ends, fetches, backs up and releases.

backward of layer i    back up and release i+1; wait fetch(i); start fetch(i-1); autograd
end of backward        compute waits for all backups; nothing is fetched, nothing in flight
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from ..comm.agreement import agree
from ..comm.communicator import Communicator
from .autograd import EndOfBackward, accumulates_everywhere, backward_task, before_gradient_flows, inside_backward
from .coordination import Action, Activity, Gate
from .gradient_reducer import Backup
from .layer_state import LayerState, Presence
from .schedule import Call, CallTrace, ForwardOrder, Step

__all__: list[str] = []

_BACKWARD = "the layers that take part in backward"

LayerTrace = CallTrace[LayerState]
LayerCall = Call[LayerState]


class Frame(NamedTuple):
    """A layer's forward under way."""

    state: LayerState
    start: int
    clock: int  # of the graph: the nodes that the forward makes are not older
    recomputes: bool
    fetched_here: bool


class Backward:
    """What backward does with the layers of a model, whichever hook of the graph calls first."""

    def __init__(self, communicator: Communicator, backup_communicator: Communicator, device: torch.device, depth: int) -> None:
        self.layers: list[LayerState] = []
        self.frames: list[Frame] = []  # forwards under way; inside a backward, recomputations
        self._communicator = communicator
        self._backup_communicator = backup_communicator
        self._device = device
        self._depth = depth
        # of the tapes, with what is done with each layer's gradients; nested backwards have their own
        self.order: ForwardOrder[tuple[tuple[LayerState, ...], tuple[str, ...]]] = ForwardOrder()
        self._touched: list[LayerTrace] = []  # the tapes it has come to
        self._backups: deque[Backup] = deque()
        self._reduces = False  # whether this backward reduces anything: `autograd.grad` does not
        self._owes = False  # whether `no_sync` was ever used
        self._ending = EndOfBackward()  # of the present one
        self._outer_ending = EndOfBackward()  # of one that recomputes layers and runs backwards of its own through them

    def watch(self, state: LayerState) -> None:
        """Takes charge of `state`: whatever gradient it gets, by whatever way, is reduced by the end of the backward."""
        self.layers.append(state)
        state.gradients.watch(partial(_tell, weakref.WeakMethod(self.gradient_came)), partial(_tell, weakref.WeakMethod(self.settle)))

    def follow(self, tape: LayerTrace, call: LayerCall, nodes: Iterable[Node], mark: object) -> None:
        """From now on, a gradient that flows into `nodes` opens `call` first."""
        before_gradient_flows(nodes, partial(self._before, tape, call), mark)

    def forbid(self, state: LayerState, nodes: Iterable[Node]) -> None:
        """A gradient that flows into `nodes`, which were computed while the layer was resident, is an error."""
        label = state.label

        def refuse() -> None:
            raise RuntimeError(
                f"backward through layer {label}, whose forward ran inside zero3.resident(model): ranks may have made different "
                "forwards there, so gradients can't be reduced. Run what you train outside of it."
            )

        before_gradient_flows(nodes, refuse, mark=self)

    @property
    def at_own_pace(self) -> bool:
        """Inside `resident`: the ranks may be at different points, or at none."""
        return all(state.resident for state in self.layers)

    @property
    def gate(self) -> Gate:
        return self.layers[0].gate

    def help_back_up(self, state: LayerState) -> None:
        """Takes part in a reduction for ranks that have gradients, on one that has none but what `no_sync` has kept."""
        for backup in state.gradients.back_up(state.lanes.backup, self._backup_communicator):
            backup.wait()

    @property
    def running(self) -> bool:
        return self._ending.awaited

    def is_recomputing(self, state: LayerState) -> bool:
        """Whether a forward of `state` now is a checkpoint's recomputation of a call that this backward has on a tape."""
        return self.running and any(tape.holds(state) for tape in self._touched)

    def release(self, state: LayerState) -> None:
        """Releases `state`, unless one of its calls is under way."""
        if state.presence is Presence.RELEASED or any(frame.state is state for frame in self.frames):
            return
        if not any(tape.is_open(state) for tape in self._touched):
            state.release_or_keep()

    def recompute(self) -> None:
        """Before a forward inside a backward. If it belongs to a reentrant checkpoint, its own backward ends before this one."""
        if not self._ending.awaited and not self._outer_ending.awaited:
            self._outer_ending.wait(then=self._end_outer)
        self.gate.enter(Activity.BACKWARD)
        self._finish_nested()

    def _finish_nested(self) -> None:
        """Ends the walk over tapes of backwards that ran inside this one and are over (reentrant checkpointing)."""
        task = backward_task()
        for nested in [tape for tape in self._touched if tape.task > task]:
            self._finish(nested)

    def reset(self, *, broken: bool = False) -> None:
        """Releases everything. If the last backward raised, the gradients accumulated so far are dropped with it,
        or, in a transaction, are again what they were."""
        broken_backward = self._ending.missed or self._outer_ending.missed
        while self._backups:
            try:
                self._backups.popleft().wait()
            except RuntimeError:  # a transfer that failed is over
                broken_backward = True
        for tape in self._touched:
            tape.rewind()
        self._touched.clear()
        self.frames.clear()
        self._reduces = False
        self._ending.forget()
        if self._outer_ending.missed:
            self._outer_ending.forget()
        for state in self.layers:
            state.reset(broken=broken or broken_backward)
            if broken_backward:
                state.gradients.give_up()
        self._forget_zeroed()

    def _forget_zeroed(self) -> None:
        """What `no_sync` kept, and the user has given up since. Where nothing shows that, what was given up elsewhere does."""
        if not self._owes:
            return
        zeroed = [state for state in self.layers if state.gradients.forget_zeroed()]
        for state in self.layers if zeroed else ():
            state.gradients.forget_unseen()

    def _before(self, tape: LayerTrace, call: LayerCall) -> None:
        """A gradient is about to flow into the graph of `call`."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True through layer {call.layer.label}: the graph of the gradients would use the layer's "
                "weights after they are released. Double backward is not supported; compute such a term on an unsharded model."
            )
        self._enter()
        self._finish_nested()
        for newer in [t for t in self._touched if t.serial > tape.serial]:
            self._finish(newer)
        if tape not in self._touched:
            self._touch(tape)
        for step in tape.advance(call):
            self._take(step, tape)

    def _touch(self, tape: LayerTrace) -> None:
        signature = tape.signature()
        reductions = tuple(state.gradients.reduction for state in signature)
        if not self.order.advance((signature, reductions)):
            names = [f"{state.name_among_ranks}, {how}" for state, how in zip(signature, reductions, strict=True)]
            signature[0].watch.recorder("agree", _BACKWARD, *names)
            with self.gate.passing(Action.AGREE, self.layers[0]):
                agree(self._communicator, self._device, _BACKWARD, names)
        # `autograd.grad` writes no parameter's gradient: then nothing is reduced
        tape.reduces = accumulates_everywhere() or any(state.gradients.expected() for state in dict.fromkeys(reversed(signature)))
        self._reduces = self._reduces or tape.reduces
        tape.task = backward_task()
        self._touched.append(tape)

    def _take(self, step: Step[LayerState], tape: LayerTrace) -> None:
        state = step.call.layer
        if step.opens:
            state.fetch()
            for following in tape.upcoming(self._depth):
                following.start_fetch()
            return
        state.check_unwritten()  # an optimizer that steps in hooks of parameters would train nothing
        if step.reduce and tape.reduces:
            self._back_up(state)
        self.release(state)

    def _finish(self, tape: LayerTrace) -> None:
        for step in tape.finish(complete=tape.reduces):
            self._take(step, tape)
        self._touched.remove(tape)

    def _back_up(self, state: LayerState, *, whole: bool = False) -> None:
        self._owes = self._owes or state.gradients.deferred
        while len(self._backups) >= max(1, self._depth):
            self._backups.popleft().wait()
        keeps = state.gradients.deferred and not whole
        with nullcontext() if keeps else self.gate.passing(Action.REDUCE, state):
            self._backups.extend(state.gradients.back_up(state.lanes.backup, self._backup_communicator, whole=whole))
        if not self._depth:
            self._drain_backups()

    def settle(self) -> None:
        """Somebody looks at a gradient that has stayed whole (stage 1): now all of them are reduced, on every rank."""
        if inside_backward():
            raise RuntimeError("with stage=1 gradients are reduced after backward: don't look at them in hooks")
        self._forget_zeroed()
        for state in self.layers:
            if state.gradients.owed():
                self._back_up(state, whole=True)
        self._drain_backups()

    def _drain_backups(self) -> None:
        while self._backups:
            self._backups.popleft().wait()

    def _enter(self) -> None:
        if self.running:
            return
        if self._ending.missed:
            self.reset()
        self._forget_zeroed()
        self._ending.wait(then=self._end)
        self.gate.enter(Activity.BACKWARD)
        self.order.begin()

    def _end(self) -> None:
        for tape in sorted(self._touched, key=lambda tape: -tape.serial):
            self._finish(tape)
        for state in self.layers:
            if state.gradients.pending() or (self._owes and self._reduces and state.gradients.due()):
                self._back_up(state)
        self._drain_backups()
        self._reduces = False
        for state in self.layers:
            self.release(state)
        self.order.learn()
        if not self._outer_ending.awaited:
            self._commit()
        self._leave()

    def _end_outer(self) -> None:
        self._commit()
        self._leave()

    def _commit(self) -> None:
        for state in self.layers:
            state.gradients.commit()

    def _leave(self) -> None:
        self.gate.leave(Activity.BACKWARD)

    def gradient_came(self) -> None:
        """A layer's first gradient, perhaps by a way outside its calls: make sure that this backward ends by reducing it."""
        if inside_backward():
            self._enter()


def _tell(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Hooks hold no runtime: a model that is given up is freed at once."""
    told = method()
    if told is not None:
        told()
