"""One per model: decides when its layers are fetched and released in forward, and hands them to backward.

    forward of layer i     release what the last call left; wait fetch(i); start fetch(i+1); module(x)

Every rank makes the same collectives in the same order, whatever its data: forward by the order of calls, which is
compared before it is first relied on, backward by walking the tape of that forward from its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from types import TracebackType
from typing import Any

import torch

from .agreement import agree
from .autograd import graph_clock, inside_backward, nodes_since
from .backward import Backward, Frame, LayerTape
from .collectives import Communicator
from .layer_state import LayerState, Presence
from .policy import ShardingPolicy
from .schedule import ForwardOrder, Tape
from .tree import tensors_in

__all__: list[str] = []


class Runtime:
    def __init__(self, layers: Sequence[LayerState], policy: ShardingPolicy, *, ordered: bool) -> None:
        first = layers[0]
        self._communicator = first.communicator
        self._device = first.device
        self._depth = policy.prefetch_depth
        self._order: ForwardOrder[LayerState | None] = ForwardOrder(layers if ordered else ())  # None: between modules
        twin = first.communicator.twin() if policy.separate_backup_group else first.communicator
        self._backward = Backward(first.communicator, twin, first.device, policy.prefetch_depth)
        self._tape: LayerTape | None = None  # of the forward under way
        self._open_tape: LayerTape | None = None  # of a forward that another module may continue
        self._passes = 0
        self.rehearsed: dict[object, Any] = {}  # see `step_guard`
        self._lingering: list[LayerState] = []  # forward is over, backward may need them at once
        self._called: set[int] = set()  # outermost modules of the present pass, by id: a reference would keep them alive
        for state in layers:
            self.join(state)

    # -- forward

    def forward_pass(self, module: object) -> _ForwardPass:
        """The context of any zero3 module's forward. See `_begin_call` for when a new pass begins."""
        return _ForwardPass(self, module)

    @property
    def layers(self) -> list[LayerState]:
        return self._backward.layers

    @property
    def orders(self) -> tuple[ForwardOrder[Any], ForwardOrder[Any]]:
        """Of forwards and of backwards."""
        return self._order, self._backward.order

    @property
    def lone(self) -> bool:
        return len(self.layers) == 1

    def is_running(self, state: LayerState) -> bool:
        """Whether a forward of `state` is under way."""
        return any(frame.state is state for frame in self._backward.frames)

    def serves(self, communicator: Communicator, device: torch.device) -> bool:
        return self._communicator.same_ranks(communicator) and self._device == device

    def join(self, state: LayerState) -> None:
        """Takes in a layer that was found to follow this runtime's in a graph."""
        self._backward.watch(state)
        state.lanes = self.layers[0].lanes
        state.subject.journal = self.layers[0].journal

    def pre_forward(self, state: LayerState) -> None:
        if state.resident:  # ranks may be at different points, or at none: no word and no transfer
            state.fetch()
            self._backward.frames.append(Frame(state, 0, graph_clock(), recomputes=True, fetched_here=False))
            return
        if self._backward.is_recomputing(state):
            released = state.presence not in (Presence.FETCHED, Presence.KEPT)
            state.fetch()
            self._backward.frames.append(Frame(state, 0, graph_clock(), recomputes=True, fetched_here=released))
            return
        tape = self._tape
        if tape is None:
            raise RuntimeError(f"layer {state.label} was called outside a forward pass of its model")
        ahead: list[LayerState] = []
        if not inside_backward():
            if not state.guarded and not self._backward.frames and state.journal.due(state.policy.compare_every):
                state.compare()
            if not self._order.advance(state):
                place = f"the layer called as number {self._order.position} of a forward"
                state.recorder("agree", place, state.name_among_ranks)
                agree(self._communicator, self._device, place, [state.name_among_ranks])
            ahead = self._ahead()
        self._release_lingering(keep=[state, *ahead])
        state.fetch()
        for following in ahead:
            following.start_fetch()
        self._backward.frames.append(Frame(state, tape.begin(), graph_clock(), recomputes=False, fetched_here=True))

    def post_forward(self, state: LayerState, output: Any, kept: Any) -> Any:
        """`kept`: wherever else the layer may have left tensors: arguments that it changed, attributes of its modules."""
        frame = self._backward.frames.pop()
        outputs, kept_tensors = list(tensors_in(output)), list(tensors_in(kept))
        state.check_unwritten()
        state.let_escape(outputs + kept_tensors)
        nodes = nodes_since(frame.clock, outputs + kept_tensors)
        if state.resident:
            self._backward.forbid(state, nodes)
            return output
        if frame.recomputes:
            if frame.fetched_here:
                self._backward.release(state)
            return output
        # Whether it is recorded must not depend on what this rank's data made it do: its input may be its output.
        takes_part = nodes or state.trainable() or any(tensor.requires_grad for tensor in outputs)
        if self._tape is not None and torch.is_grad_enabled() and takes_part:
            call = self._tape.record(state, frame.start)
            self._backward.follow(self._tape, call, nodes, mark=self)
            self._lingering.append(state)
        else:
            self._backward.release(state)
        return output

    def _begin_call(self, module: object) -> None:
        """An outermost module is called. It continues the pass of the one before (a plain container calls one layer
        after another), unless it has been called in that pass, or a backward has ended since: then a new one begins.
        """
        if inside_backward():
            self._backward.recompute()
            self._tape = self._new_tape()
            return
        if self._open_tape is not None and not self._open_tape.walked and id(module) not in self._called:
            self._tape = self._open_tape
            self._order.advance(None)
            self._release_lingering(keep=())  # an optimizer may have stepped between two modules
        else:
            self.reset()
            self._order.begin()
            self.layers[0].journal.passes += 1
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
            if state in kept:
                state.keep()
            elif state.presence is not Presence.RELEASED:
                self._backward.release(state)

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
                self._backward.release(state)
        self._lingering = [state for state in self._lingering if state.presence is not Presence.RELEASED]

    def reset(self) -> None:
        """Releases everything and forgets the pass under way. See `Backward.reset` for the gradients."""
        self._lingering.clear()
        self._called.clear()
        self._tape = self._open_tape = None
        self._backward.reset()


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
        self._frames = len(runtime._backward.frames)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        runtime = self._runtime
        del runtime._backward.frames[self._frames :]
        if self._outermost and kind is None:
            runtime._end_call()
        elif self._outermost:
            runtime._tape = runtime._open_tape = None
