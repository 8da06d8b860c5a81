"""One per model: decides when its layers are fetched, backed up and released, forward and backward.

    forward of layer i     release what the last call left; wait fetch(i); start fetch(i+1); module(x)
    backward of layer i    back up and release i+1; wait fetch(i); start fetch(i-1); autograd
    end of backward        compute waits for all backups; nothing is fetched, nothing in flight

Every rank makes the same collectives in the same order, whatever its data: forward by the order of calls, which is
compared before it is first relied on, backward by walking the tape of that forward from its end.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import takewhile
from types import TracebackType
from typing import Any, NamedTuple

import torch

from .agreement import agree
from .autograd import backward_task, before_gradient_flows, inside_backward, when_backward_ends
from .collectives import Communicator
from .gradient import Backup
from .layer_state import LayerState, Presence
from .policy import ShardingPolicy
from .schedule import Call, ForwardOrder, Step, Tape
from .tree import tensors_in

__all__: list[str] = []

LayerTape = Tape[LayerState]
LayerCall = Call[LayerState]


class _Frame(NamedTuple):
    """A layer's forward under way."""

    state: LayerState
    start: int
    recomputes: bool
    fetched_here: bool


class _Token:
    """Lives as long as the backward whose final callback holds it: dead without having finished means that it raised."""


class Runtime:
    def __init__(self, layers: Sequence[LayerState], policy: ShardingPolicy, *, ordered: bool) -> None:
        first = layers[0]
        self._communicator = first.communicator
        self._device = first.device
        self._backup_communicator = first.communicator.twin() if policy.separate_backup_group else first.communicator
        self._depth = policy.prefetch_depth
        self._order: ForwardOrder[LayerState | None] = ForwardOrder(layers if ordered else ())  # None: between modules
        self._agreed: set[tuple[LayerState, ...]] = set()  # tapes that all ranks are known to share
        self._tape: LayerTape | None = None  # of the forward under way
        self._open_tape: LayerTape | None = None  # of a forward that another module may continue
        self._passes = 0
        self._frames: list[_Frame] = []
        self._lingering: list[LayerState] = []  # forward is over, backward may need them at once
        self._touched: list[LayerTape] = []  # tapes the present backward has come to, newest first
        self._backups: deque[Backup] = deque()
        self._backward: weakref.ref[_Token] | None = None
        self._called: set[int] = set()  # outermost modules of the present pass, by id: a reference would keep them alive
        self.layers: list[LayerState] = []
        for state in layers:
            self.join(state)

    # -- forward

    def forward_pass(self, module: object) -> _ForwardPass:
        """The context of any zero3 module's forward. See `_begin_call` for when a new pass begins."""
        return _ForwardPass(self, module)

    @property
    def lone(self) -> bool:
        return len(self.layers) == 1

    def serves(self, communicator: Communicator, device: torch.device) -> bool:
        return self._communicator.same_ranks(communicator) and self._device == device

    def join(self, state: LayerState) -> None:
        """Takes in a layer that was found to follow this runtime's in a graph."""
        self.layers.append(state)
        state.lanes = self.layers[0].lanes
        state.watch_gradients(partial(_gradient_outside_calls, weakref.ref(self)))

    def pre_forward(self, state: LayerState) -> None:
        if self._in_backward() and any(tape.holds(state) for tape in self._touched):
            released = state.presence is not Presence.FETCHED
            self._fetch(state)  # a checkpoint recomputes a call that this backward has on its tape
            self._frames.append(_Frame(state, 0, recomputes=True, fetched_here=released))
            return
        tape = self._tape
        if tape is None:
            raise RuntimeError(f"layer {state.label} was called outside a forward pass of its model")
        ahead: list[LayerState] = []
        if not inside_backward():
            if not self._order.advance(state):
                self._agree(f"the layer called as number {self._order.position} of a forward", [state.label])
            ahead = self._ahead()
        self._release_lingering(keep=[state, *ahead])
        self._fetch(state)
        for following in ahead:
            following.start_fetch()
        self._frames.append(_Frame(state, tape.begin(), recomputes=False, fetched_here=True))

    def post_forward(self, state: LayerState, output: Any) -> Any:
        frame = self._frames.pop()
        tensors = list(tensors_in(output))
        state.let_escape(tensors)
        if frame.recomputes:
            if frame.fetched_here:
                self._release(state)
            return output
        differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        if self._tape is not None and torch.is_grad_enabled() and (differentiable or state.trainable()):
            call = self._tape.record(state, frame.start)
            before_gradient_flows(differentiable, partial(self._pre_backward, self._tape, call), mark=self)
            self._lingering.append(state)
        else:
            self._release(state)
        return output

    def _begin_call(self, module: object) -> None:
        """An outermost module is called. It continues the pass of the one before (a plain container calls one layer
        after another), unless it has been called in that pass, or a backward has ended since: then a new one begins.
        """
        if inside_backward():
            self._finish_nested()
            self._tape = self._new_tape()
            return
        if self._open_tape is not None and id(module) not in self._called:
            self._tape = self._open_tape
            self._order.advance(None)
            self._release_lingering(keep=())  # an optimizer may have stepped between two modules
        else:
            self.reset()
            self._order.begin()
            self._tape = self._new_tape()
        self._called.add(id(module))

    def _end_call(self) -> None:
        tape, self._tape = self._tape, None
        if inside_backward() or tape is None:
            return
        self._open_tape = tape
        self._order.learn()
        kept = self._lingering if tape.calls else []
        for state in self.layers:
            if state.presence is not Presence.RELEASED and state not in kept:
                self._release(state)

    def _new_tape(self) -> LayerTape:
        self._passes += 1
        return Tape(serial=self._passes)

    def _ahead(self) -> list[LayerState]:
        """The layers to prefetch: never beyond the outermost module that runs, for what follows it may come after a step."""
        return [state for state in takewhile(lambda state: state is not None, self._order.upcoming(self._depth)) if state is not None]

    def _release_lingering(self, keep: Iterable[LayerState]) -> None:
        kept = set(keep)
        for state in self._lingering:
            if state not in kept and state.policy.reshard_after_forward:
                self._release(state)
        self._lingering = [state for state in self._lingering if state.presence is not Presence.RELEASED]

    # -- backward

    def _pre_backward(self, tape: LayerTape, call: LayerCall) -> None:
        """A gradient is about to flow into the graph of `call`."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True through layer {call.layer.label}: the graph of the gradients would use the layer's "
                "weights after they are released. Double backward is not supported; compute such a term on an unsharded model."
            )
        self._enter_backward()
        self._finish_nested()
        for newer in [t for t in self._touched if t.serial > tape.serial]:
            self._finish(newer)
        if tape not in self._touched:
            self._touch(tape)
        for step in tape.advance(call):
            self._take(step, tape)

    def _finish_nested(self) -> None:
        """Ends the walk over tapes of backwards that ran inside this one and are over (reentrant checkpointing)."""
        for nested in [tape for tape in self._touched if tape.task > backward_task()]:
            self._finish(nested)

    def _touch(self, tape: LayerTape) -> None:
        signature = tape.signature()
        if signature not in self._agreed:
            self._agree("the layers that take part in backward", [state.label for state in signature])
            self._agreed.add(signature)
        # `autograd.grad` writes no parameter's gradient: then nothing is reduced
        tape.reduces = any(state.receives_gradients() for state in dict.fromkeys(reversed(signature)))
        tape.task = backward_task()
        self._touched.append(tape)

    def _take(self, step: Step[LayerState], tape: LayerTape) -> None:
        state = step.call.layer
        if step.opens:
            self._fetch(state)
            for following in tape.upcoming(self._depth):
                following.start_fetch()
            return
        if step.reduce and tape.reduces:
            self._back_up(state)
        self._release(state)

    def _finish(self, tape: LayerTape) -> None:
        for step in tape.finish(complete=tape.reduces):
            self._take(step, tape)
        self._touched.remove(tape)

    def _back_up(self, state: LayerState) -> None:
        while len(self._backups) >= max(1, self._depth):
            self._backups.popleft().wait()
        self._backups.extend(state.back_up(self._backup_communicator))
        if not self._depth:
            self._drain_backups()

    def _drain_backups(self) -> None:
        while self._backups:
            self._backups.popleft().wait()

    def _enter_backward(self) -> None:
        if self._in_backward():
            return
        if self._backward is not None:
            self.reset()  # the one before raised
        token = _Token()
        self._backward = weakref.ref(token)
        when_backward_ends(partial(self._end_backward, token))

    def _end_backward(self, token: _Token) -> None:
        for tape in sorted(self._touched, key=lambda tape: -tape.serial):
            self._finish(tape)
        for state in self.layers:
            if state.has_gradients():
                self._back_up(state)
        self._drain_backups()
        for state in self.layers:
            self._release(state)
        self._lingering.clear()
        self._backward = self._open_tape = None

    def gradient_outside_calls(self) -> None:
        """A layer's first gradient came in: make sure that this backward ends by reducing it."""
        if inside_backward():
            self._enter_backward()

    def _in_backward(self) -> bool:
        return self._backward is not None and self._backward() is not None

    def _is_open(self, state: LayerState) -> bool:
        return any(tape.is_open(state) for tape in self._touched) or any(frame.state is state for frame in self._frames)

    # -- both

    def reset(self) -> None:
        """Releases everything. If the last backward raised, the gradients accumulated so far are dropped with it."""
        broken = self._backward is not None and not self._in_backward()
        while self._backups:
            try:
                self._backups.popleft().wait()
            except RuntimeError:  # a transfer that failed is over
                broken = True
        for tape in self._touched:
            tape.rewind()
        self._touched.clear()
        self._frames.clear()
        self._lingering.clear()
        self._called.clear()
        self._tape = self._open_tape = self._backward = None
        for state in self.layers:
            state.reset()
            if broken:
                state.drop_gradients()

    @staticmethod
    def _fetch(state: LayerState) -> None:
        state.start_fetch()
        state.finish_fetch()

    def _release(self, state: LayerState) -> None:
        if not self._is_open(state):
            state.release()

    def _agree(self, subject: str, lines: list[str]) -> None:
        agree(self._communicator, self._device, subject, lines)


class _ForwardPass:
    """Entered by every zero3 module's forward. Restores what it found, so an exception anywhere leaves no trace."""

    __slots__ = ("_frames", "_module", "_outermost", "_runtime")

    def __init__(self, runtime: Runtime, module: object) -> None:
        self._runtime = runtime
        self._module = module

    def __enter__(self) -> None:
        runtime = self._runtime
        self._outermost = runtime._tape is None
        if self._outermost:
            runtime._begin_call(self._module)
        self._frames = len(runtime._frames)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        runtime = self._runtime
        del runtime._frames[self._frames :]
        if self._outermost and kind is None:
            runtime._end_call()
        elif self._outermost:
            runtime._tape = runtime._open_tape = None


def _gradient_outside_calls(runtime: weakref.ref[Runtime]) -> None:
    found = runtime()
    if found is not None:
        found.gradient_outside_calls()
