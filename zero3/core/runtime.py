"""One per model: decides when its layers are fetched and released in forward, and hands them to backward.

    forward of layer i     release what the last call left; wait fetch(i); start fetch(i+1); module(x)

Every rank makes the same collectives in the same order, whatever its data: forward by the order of calls, which is
compared before it is first relied on, backward by walking the tape of that forward from its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from ..comm.agreement import agree
from ..comm.communicator import Communicator
from ..policy import ShardingPolicy
from .autograd import graph_clock, inside_backward, nodes_since
from .backward import Backward, Frame, LayerTrace
from .coordination import Action, Activity
from .layer_state import LayerState, Presence
from .requires_grad import check_requires_grad
from .schedule import CallTrace, Event, ForwardOrder, StaticOrder
from .tree import tensors_in

__all__: list[str] = []


class Runtime:
    def __init__(self, layers: Sequence[LayerState], policy: ShardingPolicy, *, ordered: bool, depths: Sequence[int]) -> None:
        """`ordered`: layers are called in this order. `depths`: in how many layers each lies."""
        first = layers[0]
        self._communicator = first.communicator
        self._device = first.device
        self._depth = policy.prefetch_depth
        self._order: ForwardOrder[LayerState | None] = ForwardOrder(layers if ordered else ())  # None: between modules
        self._program = StaticOrder(zip(layers, depths, strict=True)) if policy.dynamic else None
        self._passed_over: dict[LayerState, int] = {}  # layers of the program that this rank has not called: when they began
        twin = first.communicator.duplicate() if policy.separate_backup_group else first.communicator
        self._backward = Backward(first.communicator, twin, first.device, policy.prefetch_depth)
        self._tape: LayerTrace | None = None  # of the forward under way
        self._open_tape: LayerTrace | None = None  # of a forward that another module may continue
        self._passes = 0
        self.rehearsed: dict[object, Any] = {}  # see `step_guard`
        self._lingering: list[LayerState] = []  # forward is over, backward may need them at once
        self._called: set[int] = set()  # outermost modules of the present pass, by id: a reference would keep them alive
        for state in layers:
            self._watch(state)

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
    def awaits_backward(self) -> bool:
        """Whether there is a forward that no backward has been through."""
        return self._open_tape is not None and bool(self._open_tape.calls) and not self._open_tape.walked

    def is_running(self, state: LayerState) -> bool:
        """Whether a forward of `state` is under way."""
        return any(frame.state is state for frame in self._backward.frames)

    def serves(self, communicator: Communicator, device: torch.device) -> bool:
        return self._communicator.same_ranks(communicator) and self._device == device

    def join(self, state: LayerState) -> None:
        """Takes in a layer that was found to follow this runtime's in a graph."""
        if self._program is not None:
            raise ValueError(
                f"layer {state.label} is called by a plain module, after others with ShardingPolicy(dynamic=True): a rank that leaves it "
                "out could not know of it. Put the layers into one Zero3Sequential, or use zero3.shard(model)."
            )
        self._watch(state)

    def _watch(self, state: LayerState) -> None:
        self._backward.watch(state)
        state.lanes = self.layers[0].lanes
        state.watch.share(self.layers[0].watch.journal)

    def pre_forward(self, state: LayerState) -> None:
        if state.resident or self._backward.is_recomputing(state):  # resident: ranks may be at different points, so no word to them
            released = state.presence not in (Presence.FETCHED, Presence.KEPT) and not state.resident
            state.fetch()
            self._backward.frames.append(Frame(state, 0, graph_clock(), recomputes=True, fetched_here=released))
            return
        tape = self._tape
        if tape is None:
            raise RuntimeError(f"layer {state.label} was called outside a forward pass of its model")
        if self._program is not None and inside_backward():
            raise RuntimeError(
                f"layer {state.label}: reentrant checkpointing does not go together with ShardingPolicy(dynamic=True), for ranks would "
                "recompute different layers. Use checkpoint(..., use_reentrant=False)."
            )
        ahead: list[LayerState] = []
        if not inside_backward():
            if not self._backward.frames and self._program is None:
                state.watch.compare_if_due()
            self._advance(state)
            ahead = self._ahead()
        self._release_lingering(keep=[state, *ahead])
        state.fetch()
        check_requires_grad(state, self.layers)
        for following in ahead:
            following.start_fetch()
        self._backward.frames.append(Frame(state, tape.begin(), graph_clock(), recomputes=False, fetched_here=True))

    def _advance(self, state: LayerState) -> None:
        """`state` is called now, which the other ranks have foreseen, or are asked about."""
        if self._program is not None:
            self._take_part(self._program.until(state, begins=True), state)
        elif not self._order.advance(state):
            place = f"the layer called as number {self._order.position} of a forward"
            state.watch.recorder("agree", place, state.name_among_ranks)
            with state.gate.passing(Action.AGREE, self.layers[0]):
                agree(self._communicator, self._device, place, [state.name_among_ranks])

    def _take_part(self, passed: list[Event[LayerState]] | None, state: LayerState | None = None) -> None:
        """The transfers of layers that this rank passes over, and others may call; a backward will make theirs too."""
        if passed is None:
            label = state.label if state is not None else ""
            raise ValueError(
                f"layer {label} is called a second time in a forward, or after layers that stand behind it in the model. With "
                "ShardingPolicy(dynamic=True) layers are called in the order in which they stand, each at most once."
            )
        for layer, begins in passed:
            if begins:
                self._release_lingering(keep=[layer])
                layer.fetch()
                self._passed_over[layer] = self._tape.begin() if self._tape is not None else 0
                continue
            start = self._passed_over.pop(layer, None)
            if start is None:
                continue  # a call of this rank's own, which an exception has ended
            if self._tape is not None and torch.is_grad_enabled():
                self._tape.record(layer, start)
                self._lingering.append(layer)
            else:
                self._backward.release(layer)

    def fail_together(self, error: BaseException) -> None:
        """The others wait for this rank's part in the rest of the forward; then they hear why it ends."""
        alone = inside_backward() or self._backward.at_own_pace or not isinstance(error, Exception)
        if self._program is None or self._tape is None or alone:
            return
        try:
            self._take_part(self._program.rest())
            cause = RuntimeError(f"its forward failed with {type(error).__name__}: {error}")
            agree(self._communicator, self._device, "the end of a forward", [], cause)
        except (RuntimeError, ValueError, TypeError) as told:  # this rank's own error is on its way
            told.__traceback__ = None  # a cycle: it would keep the forward's tensors alive

    def post_forward(self, state: LayerState, output: Any, kept: Any) -> Any:
        """`kept`: wherever else the layer may have left tensors: arguments that it changed, attributes of its modules."""
        frame = self._backward.frames.pop()
        outputs = tensors_in(output)
        seen = outputs + tensors_in(kept)
        state.check_unwritten()
        state.let_escape(seen)
        nodes = nodes_since(frame.clock, seen)
        if state.resident:
            self._backward.forbid(state, nodes)
            return output
        if frame.recomputes:
            if frame.fetched_here:
                self._backward.release(state)
            return output
        if self._program is not None and not inside_backward():
            self._take_part(self._program.until(state, begins=False), state)
        # Whether it is recorded must not depend on what this rank's data made it do: its input may be its output.
        takes_part = nodes or state.trainable() or any(tensor.requires_grad for tensor in outputs) or self._program is not None
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
            self.reset(broken=False)
            self._drop_stale()
            self._order.begin()
            self.layers[0].watch.journal.passes += 1
            self._tape = self._new_tape()
        self._called.add(id(module))
        if self._program is not None:
            self._program.begin()

    def _end_call(self) -> None:
        if self._program is not None and not inside_backward() and not self._backward.at_own_pace:
            self._take_part(self._program.rest())
        tape, self._tape = self._tape, None
        if inside_backward() or tape is None:
            return
        if self._program is not None and not self._backward.at_own_pace:
            agree(self._communicator, self._device, "the end of a forward", [self.layers[0].watch.journal.summary()])
        self._open_tape = tape
        self._order.learn()
        kept = self._lingering if tape.calls else []
        for state in self.layers:
            if state in kept:
                state.keep()
            elif state.presence is not Presence.RELEASED:
                self._backward.release(state)

    def _new_tape(self) -> LayerTrace:
        self._passes += 1
        return CallTrace(serial=self._passes)

    def _ahead(self) -> list[LayerState]:
        """The layers to prefetch: never beyond the outermost module that runs, for what follows it may come after a step."""
        upcoming = self._order.upcoming(self._depth) if self._program is None else self._program.upcoming(self._depth)
        return [state for state in upcoming[: upcoming.index(None) if None in upcoming else None] if state is not None]

    def _release_lingering(self, keep: Iterable[LayerState]) -> None:
        kept = set(keep)
        for state in self._lingering:
            if state not in kept and not state.policy.keeps_until_backward:
                self._backward.release(state)
        self._lingering = [state for state in self._lingering if state.presence is not Presence.RELEASED]

    def _drop_stale(self) -> None:
        """Layers that stayed whole are gathered anew where any rank's chunk has changed since."""
        whole = [state for state in self.layers if state.chunks and not state.policy.shards_parameters and not state.resident]
        if not whole or self._communicator.world_size == 1:
            return
        is_stale = torch.stack([state.is_stale() for state in whole]).to(torch.uint8)
        with self.layers[0].gate.passing(Action.LOOK, self.layers[0]):
            self._communicator.all_reduce(is_stale, maximum=True)
        for state, flag in zip(whole, is_stale.tolist(), strict=True):
            if flag:
                state.release()

    def reset(self, *, broken: bool = True) -> None:
        """Releases everything and forgets the pass under way. See `Backward.reset` for the gradients.

        `broken`: layers that stay whole are released as well.
        """
        self._lingering.clear()
        self._passed_over.clear()
        self._called.clear()
        self._tape = self._open_tape = None
        self._backward.reset(broken=broken)


class _ForwardPass:
    """Entered by every zero3 module's forward. Restores what it found, so an exception anywhere leaves no trace."""

    __slots__ = ("_enters", "_frames", "_module", "_outermost", "_runtime")

    def __init__(self, runtime: Runtime, module: object) -> None:
        self._runtime = runtime
        self._module = module

    def __enter__(self) -> None:
        runtime = self._runtime
        self._outermost = runtime._tape is None
        self._enters = self._outermost and not inside_backward()
        if self._enters:
            runtime.layers[0].gate.enter(Activity.FORWARD)
        if self._outermost:
            runtime._begin_call(self._module)
        self._frames = len(runtime._backward.frames)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        runtime = self._runtime
        del runtime._backward.frames[self._frames :]
        if self._outermost and kind is None:
            runtime._end_call()
        elif self._outermost:
            if error is not None:
                runtime.fail_together(error)
            runtime._tape = runtime._open_tape = None
        if self._enters:
            runtime.layers[0].gate.leave(Activity.FORWARD, error)
