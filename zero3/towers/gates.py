"""Gates: where ranks tell each other which module of a tower they call next, or none.

While any rank calls one, all take the first in the model's order. Those that called it compute; the
others take part in its gathers, and record its calls, so that their backward makes its reductions
with zeros.

    rank 0 (text)     tells: none      attends vision    tells: none    language model
    rank 1 (image)    tells: vision    computes vision   tells: none    language model
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf
from struct import Struct
from typing import Any, ClassVar, NamedTuple

import torch

from ..comm.agreement import Members, agree
from ..comm.communicator import Communicator
from ..comm.errors import is_transfer_failure
from ..core.autograd import checkpoint_around, tensors_in
from ..core.layer_state import LayerState
from ..core.runtime import Runtime
from ..core.schedule import ForwardOrder, LearnedOrder, Passes
from ..experts.at_home import AtHome
from ..layer import states_in
from ..stages.dynamic import Event

__all__: list[str] = []

_CPU = torch.device("cpu")
_WORDS = Struct("<HIBQB")  # of `Message`, and the last byte, by which no other exchange ends
_LAST = 0x6A
_ABSENT = bytes(_WORDS.size)
_LISTENS, _END = 0xFFFF, 0xFFFE  # in place of a layer's begin or end
_REMEDY = (
    "What some ranks alone call around a tower, or call more often, is optional, too: name it in "
    "optional= of zero3.shard."
)
_GRADIENTS, _RAISED, _TELLS_LAYERS = 1, 2, 4
# a checkpoint recomputes the last call together with what else is called in it; what comes next is
# called in the same one
_TOGETHER, _SAME_CHECKPOINT = 8, 16


class Message(NamedTuple):
    """What a rank tells at a gate, or in a tower's first call."""

    number: (
        int  # of the module that it calls next, or 0; in a first call, of a layer's begin or end
    )
    place: int = 0  # of a gate
    flags: int = 0
    digest: int = 0  # at the end of a forward, of what this rank has done

    def apart(self, other: Message) -> bool:
        """Whether one of the two is wrong."""
        both = self.flags ^ other.flags
        if both & _TELLS_LAYERS:
            return True
        if self.flags & _TELLS_LAYERS:
            return self.number != other.number and _LISTENS not in (self.number, other.number)
        if self.number or other.number:
            return False
        return (self.place, self.digest) != (other.place, other.digest)


@dataclass(frozen=True, slots=True)
class Gate:
    """Ranks tell each other what they call next.

    Raises:
        ValueError: They are not at the same gate, or call a tower's layers in different orders.
            Every rank raises it.
        RuntimeError: A rank has raised in a tower. Every other rank raises it.
    """

    layer: Any  # the model's first
    communicator: Communicator = field(compare=False)
    mine: Message = field(default=Message(0), compare=False)
    at: str = field(default="", compare=False)  # for errors
    lines: Callable[[], Sequence[str]] = field(default=tuple, compare=False)
    error: Exception | None = field(default=None, compare=False)
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return "has come to a gate"

    def perform(self) -> list[Message]:
        found = self._exchange(_WORDS.pack(*self.mine, _LAST))
        if _someone_raised(found):
            agree(Members(self.communicator, _CPU), "the call of a tower", [], self.error)
        if wrong := _apart(found):
            said = self.lines() if self.mine in wrong else None
            try:
                agree(Members(self.communicator, _CPU), self.at, said)
            except ValueError as error:
                if not any(each.flags & _TELLS_LAYERS for each in wrong):
                    error.args = (f"{error} {_REMEDY}",)
                raise
        return found

    def take_part(self) -> None:
        found = self._exchange(_ABSENT)
        if _someone_raised(found) or _apart(found):
            agree(Members(self.communicator, _CPU), "what comes next", None)

    def _exchange(self, mine: bytes) -> list[Message]:
        """What the ranks tell that are not absent."""
        told = self.communicator.exchange(mine, _CPU)
        for rank, each in enumerate(told):
            if each != _ABSENT and each[-1] != _LAST:
                raise RuntimeError(
                    f"rank {rank} is at another collective: its message has come to a gate"
                )
        return [Message(*_WORDS.unpack(each)[:-1]) for each in told if each != _ABSENT]


def _someone_raised(found: Sequence[Message]) -> bool:
    return any(each.flags & _RAISED for each in found)


def _apart(found: Sequence[Message]) -> set[Message]:
    """Those that are not at the same point."""
    kinds = set(found)
    return {each for each in kinds for other in kinds if each.apart(other)}


class NextCall(NamedTuple):
    """What ranks have told at a gate."""

    number: int  # of the module that is called next, or 0
    records: bool  # whether its call takes part in backward
    same_checkpoint: bool  # whether a rank calls it in the checkpoint of what it has called before


@dataclass(slots=True)
class TowerCall:
    """A call of a tower's module under way, which this rank makes or attends."""

    number: int
    records: bool  # whether it takes part in backward, on any rank
    known: Sequence[Event[LayerState]] | None  # the first call's
    events: list[Event[LayerState]] = field(default_factory=list)
    next: int = 0  # the known event that comes next
    # the ticks at which layers have begun that this rank does not compute
    begun: defaultdict[LayerState, list[int]] = field(default_factory=lambda: defaultdict(list))

    checkpoint: object | None = None  # around the layer that was entered last

    def ahead(self, depth: int) -> list[LayerState]:
        begins = (each.layer for each in (self.known or ())[self.next :] if each.begins)
        return list(islice(begins, depth))


@dataclass(frozen=True, slots=True)
class ModuleOutside:
    """A module outside of towers."""

    name: str
    place: int  # its number
    around: frozenset[int]  # the towers in it
    gated: frozenset[int]  # those that have their gate before it, if it is called beside them
    enters: bool  # whether a call of it is to be followed, or only a gate stands before it
    is_frame: bool  # whether it is a layer's module: what is called in it is over before the layer


@dataclass(frozen=True, slots=True)
class ModuleInside:
    """A module in a tower."""

    name: str
    number: int  # among all towers' modules, from 1
    tower: int
    module: Callable[[], Any]  # weak

    def needs_gradients(self, args: Any, kwargs: Any) -> bool:
        module = self.module()
        return (
            any(parameter.requires_grad for parameter in module.parameters())
            or any(state.parameters.may_get_gradients() for state in states_in(module))
            or any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        )


class _GivesGraph(torch.autograd.Function):
    """The tensor itself, which needs a gradient from now on and passes none on."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, needs_gradient: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        return None, None


@dataclass(slots=True)
class Pass:
    """A forward of the model."""

    active: bool = False  # whether it is under way, and not at this rank's own pace
    trains: bool = False  # whether it began with gradients on, or a checkpoint recomputes it so
    recorded: bool = False  # whether a call of it takes part in backward
    compared: bool = False  # whether ranks have compared it
    # the checkpoint in which this rank has called or attended a layer last, and the tick at which
    # ranks came to it. Whether the others are to know that it recomputes a tower's call
    checkpoint: weakref.ref[Any] | None = None
    since: int = 0
    together: bool = False
    # whether all ranks raise already, or the others can't be told where they are
    over: bool = False


class Gates:
    """The order of calls of a model with towers. Outside of towers it is learned."""

    def __init__(
        self,
        towers: Sequence[str],
        modules: Sequence[str],
        host: Communicator,
        near: Communicator,
        trunk: LearnedOrder[LayerState],
        depth: int,
    ) -> None:
        """`towers`: their names. `modules`: those of all modules in them that are called, in the
        model's order. `host`: moves what ranks tell each other; `near`: where nobody compares.
        `trunk`: the order of all else.
        """
        self.towers, self._modules = tuple(towers), tuple(modules)
        self._host, self._near, self._trunk, self._depth = host, near, trunk, depth
        self.outside: dict[int, ModuleOutside] = {}  # by the module's id
        # the towers that have their gate before a layer's call alone, since they stand in a list
        self.before: dict[Any, frozenset[int]] = {}
        self._runtime: Callable[[], Runtime | None] = lambda: None
        self._pass = Pass()
        self._stack: list[frozenset[int]] = []  # of modules under way: the towers in them
        self._call: TowerCall | None = None
        self._known: dict[int, Sequence[Event[LayerState]]] = {}

    def serve(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)

    @property
    def without_data(self) -> Gate:
        """As a rank without data takes part in it."""
        return Gate(self._passes.layers[0], self._host)

    # -- what a runtime asks of an order

    @property
    def calls(self) -> ForwardOrder[Any]:
        return self._trunk.calls

    @property
    def counts_every_call(self) -> bool:
        return (self._call is None and self._pass.recorded) or self.counts_without_graph

    @property
    def counts_without_graph(self) -> bool:
        if self._call is not None:
            return self._call.records
        # Its recomputation opens what this rank has attended since: no hook does it here.
        return not torch.is_grad_enabled() and self._checkpoint is not None

    @property
    def is_recomputed(self) -> bool:
        return self._checkpoint is not None or (self._call is not None and self._call.records)

    @property
    def _checkpoint(self) -> object | None:
        return checkpoint_around() if self._pass.trains else None

    @property
    def _is_same_checkpoint(self) -> bool:
        last = self._pass.checkpoint
        return last is not None and (around := last()) is not None and around is self._checkpoint

    def _come_to_checkpoint(self, *, same: bool) -> None:
        """Layers and modules that are called in one checkpoint are recomputed together."""
        if not same:
            self._pass.since = self._passes.now
            self._passes.unite(inf)
        self._follow(same=True)

    def _follow(self, *, same: bool) -> None:
        """`same`: what has come so far, and what comes in the checkpoint that is around this rank
        now, are recomputed together.
        """
        around = self._checkpoint if same else None
        self._pass.checkpoint = None if around is None else weakref.ref(around)

    def forget_pass(self) -> None:
        self._pass, self._call = Pass(), None
        self._stack.clear()

    def adopt(self, state: LayerState) -> None:
        self._trunk.adopt(state)

    def begin(self, *, continues: bool) -> None:
        if not self.calls.known:  # forgotten, for not all ranks have made the same calls
            self._known.clear()
        recorded = continues and self._pass.recorded
        trains = torch.is_grad_enabled() or checkpoint_around() is not None
        self._pass = Pass(True, trains, recorded)
        self._trunk.begin(continues=continues)

    def enter(self, state: LayerState, passes: Passes) -> list[LayerState]:
        call = self._call
        if call is None:
            self._come_to_checkpoint(same=(same := self._is_same_checkpoint))
            if same:  # on all ranks
                self._passes.unite(self._pass.since)
            if isinstance(state.call, AtHome) and torch.is_grad_enabled():
                state.call.expect_backward(comes=self._pass.recorded)
            return self._trunk.enter(state, passes)
        event = Event(state, begins=True)
        before, call.checkpoint = call.checkpoint, self._checkpoint
        if before is not None and before is call.checkpoint:
            self._pass.together = True
        self._come_to(call, event)
        return call.ahead(self._depth)

    def recompute(self, state: LayerState) -> list[LayerState]:
        return self._trunk.recompute(state)

    def leave(self, state: LayerState, passes: Passes) -> None:
        if (call := self._call) is not None:
            self._come_to(call, Event(state, begins=False))

    def finish(self, first: LayerState, passes: Passes) -> None:
        self._pass.active = False
        self._trunk.finish(first, passes)
        if self._pass.compared:
            passes.note_compared()

    def fail(self, first: LayerState, passes: Passes, error: BaseException) -> None:
        self._pass.active, self._call = False, None

    # -- modules outside of towers

    def run(self, spot: ModuleOutside, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Runs a module, with the gates before and in it."""
        if not self._pass.active or self._call is not None:
            return method(*args, **kwargs)
        outermost = not self._stack
        if not outermost and not spot.is_frame and self._stack[-1] & spot.gated - spot.around:
            self._pass_gate(spot.place, f"the call of {spot.name!r}")
        if not spot.enters:
            return method(*args, **kwargs)
        depth = len(self._stack)
        self._stack.append(spot.around)
        try:
            output = method(*args, **kwargs)
            if spot.around and (outermost or spot.is_frame):
                self._pass_gate(~spot.place, f"the end of {spot.name!r}", last=outermost)
            if outermost:
                self._give_graph(output, (args, kwargs))
            return output
        except Exception as error:
            if self._at_gates():
                self._tell_error(f"its forward of {spot.name!r}", error)
            self._pass.over = True  # of others nobody knows where they are
            raise
        finally:
            del self._stack[depth:]

    def _at_gates(self) -> bool:
        """Whether what the other ranks come to next is a gate, or a comparison: not if a trunk's
        module has raised, or if towers of a list of blocks alone have their gates later.
        """
        listed = frozenset().union(*self.before.values())
        here = self._stack[-1]
        following = next(iter(self.calls.upcoming(1)), None)
        if not here or here - listed or following is None:
            return bool(here)
        return bool(here & self.before.get(following, frozenset()))

    def _pass_gate(self, place: int, at: str, *, last: bool = False) -> None:
        """Takes part in what others call, until no rank calls a module of a tower. `last`: ranks
        compare what they have done.
        """
        while True:
            digest, lines = self._done() if last else (0, tuple)
            asked = self._ask(Message(0, place & 0xFFFFFFFF, 0, digest), at, lines)
            if not asked.number:
                self._pass.compared = self._pass.compared or last
                self._follow(same=asked.same_checkpoint)
                return
            self._attend(asked)

    def _done(self) -> tuple[int, Callable[[], Sequence[str]]]:
        """What ranks compare at the end of a forward. Under `Join` earlier transfers differ."""
        runtime, (first, *_) = self._passes, self._passes.layers
        recorded = runtime.recorded()
        transfers = first.log.digest if first.communicator is runtime.communicator else 0
        digest = hash((transfers, *(state.chunks.identity for state in recorded))) % 2**64
        return digest, lambda: [first.log.summary(), *(each.name_among_ranks for each in recorded)]

    def _ask(self, mine: Message, at: str, lines: Callable[[], Sequence[str]] = tuple) -> NextCall:
        told = _TOGETHER * self._pass.together | _SAME_CHECKPOINT * self._is_same_checkpoint
        found = self._exchange(mine._replace(flags=mine.flags | told), at, lines)
        self._pass.together = False
        number = min((each.number for each in found if each.number), default=0)
        flags = 0
        for each in found:
            flags |= each.flags if each.number == number else each.flags & ~_GRADIENTS
        if flags & _TOGETHER:
            self._passes.unite(self._pass.since)
        return NextCall(number, bool(flags & _GRADIENTS), bool(flags & _SAME_CHECKPOINT))

    def _exchange(
        self,
        mine: Message,
        at: str,
        lines: Callable[[], Sequence[str]] = tuple,
        error: Exception | None = None,
    ) -> list[Message]:
        first = self._passes.layers[0]
        # A rank that is elsewhere compares a call that no order predicts, or has no data: it is met
        # where comparisons are made.
        apart = not self.calls.predicts or first.communicator is not self._passes.communicator
        gate = Gate(first, self._host if apart else self._near, mine, at, lines, error)
        self._pass.over = True  # if it raises, all ranks do
        found: list[Message] = first.conductor.conduct(gate)
        self._pass.over = False
        return found

    @property
    def _passes(self) -> Runtime:
        runtime = self._runtime()
        if runtime is None:  # it holds this
            raise RuntimeError("the sharded model that this tower belongs to is gone")
        return runtime

    # -- modules in towers

    def call(self, room: ModuleInside, method: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a module of a tower, when it is its turn."""
        calls_here = self._pass.active and self._call is None and self._stack
        if not calls_here or room.tower not in self._stack[-1]:
            return method(*args, **kwargs)
        name = f"the call of {room.name!r}"
        # a checkpoint recomputes also what needs no gradient
        wants = self._checkpoint is not None or (
            torch.is_grad_enabled() and room.needs_gradients(args, kwargs)
        )
        mine = Message(room.number, flags=_GRADIENTS if wants else 0)
        while (asked := self._ask(mine, name)).number != room.number:
            self._attend(asked)
        call = self._begin(asked)
        self._pass.together = self._checkpoint is not None
        try:
            # what nobody's backward needs has no graph
            with torch.set_grad_enabled(torch.is_grad_enabled() and call.records):
                output = method(*args, **kwargs)
            self._come_to(call, None)
            return output
        except Exception as error:
            self._tell_error(f"its call of {room.name!r}", error, call)
            raise
        finally:
            self._call = None

    def _begin(self, asked: NextCall) -> TowerCall:
        self._come_to_checkpoint(same=asked.same_checkpoint)
        self._call = call = TowerCall(asked.number, asked.records, self._known.get(asked.number))
        self._pass.recorded = self._pass.recorded or asked.records
        return call

    def _attend(self, asked: NextCall) -> None:
        """Takes part in a call that other ranks make."""
        same = self._is_same_checkpoint
        call = self._begin(asked)
        self._follow(same=same)  # a checkpoint here does not recompute it
        try:
            with torch.set_grad_enabled(asked.records):
                if call.known is not None:
                    self._pass_over(call, None)
                    return
                while (told := self._tell(_LISTENS)) != _END:
                    event = Event(self._passes.layers[told // 2], bool(told % 2))
                    call.events.append(event)
                    self._do(call, event)
                self._known[asked.number] = call.events
        finally:
            self._call = None

    def _come_to(self, call: TowerCall, event: Event[LayerState] | None) -> None:
        """Comes to an event of a call, or to its end. In a tower's first call, the others are
        told.
        """
        if call.known is not None:
            self._pass_over(call, event)
        elif event is None:
            self._tell(_END)
            self._known[call.number] = call.events
        else:
            self._tell(2 * self._passes.layers.index(event.layer) + event.begins)
            call.events.append(event)

    def _tell(self, code: int) -> int:
        """What those tell that call the tower."""
        found = self._exchange(Message(code, flags=_TELLS_LAYERS), self._word_of(code))
        return min(each.number for each in found)

    def _word_of(self, code: int) -> str:
        if code >= _END:
            return "the end of a call of a tower"
        label = self._passes.layers[code // 2].label
        return f"the {'begin' if code % 2 else 'end'} of layer {label} in a tower"

    def _pass_over(self, call: TowerCall, until: Event[LayerState] | None) -> None:
        """Takes part in what this rank leaves out before `until`, or before the end."""
        known = call.known or ()
        stop = len(known)
        if until is not None:
            try:
                stop = known.index(until, call.next)
            except ValueError:
                raise ValueError(
                    f"layer {until.layer.label} is called in {self._modules[call.number - 1]!r}, "
                    "which is optional, and whose first call did not call it, or later. A call may "
                    "leave out layers, and calls no others"
                ) from None
        while call.next < stop:
            call.next += 1
            self._do(call, known[call.next - 1])
        call.next = stop + 1

    def _do(self, call: TowerCall, event: Event[LayerState]) -> None:
        if event.begins:
            begun = self._passes.begin_call(event.layer, call.ahead(self._depth))
            call.begun[event.layer].append(begun)
        else:  # the begin of one that raised was its own
            starts = call.begun[event.layer]
            self._passes.end_call(event.layer, starts.pop() if starts else 0)

    def _tell_error(self, what: str, error: Exception, call: TowerCall | None = None) -> None:
        """Makes the rest of the others' transfers in a tower, and tells them, if they can hear."""
        if self._pass.over or is_transfer_failure(error):
            return
        cause = RuntimeError(f"{what} raised {type(error).__name__}: {error}")
        try:
            if call is not None and call.known is not None:
                with torch.set_grad_enabled(call.records):
                    self._pass_over(call, None)
            self._exchange(Message(0, flags=_RAISED), what, error=cause)
        except (RuntimeError, ValueError) as told:  # the caller raises this rank's own error
            told.__traceback__ = None  # its frames would keep the forward's tensors alive

    def _give_graph(self, output: Any, given: Any) -> None:
        """Other ranks need this rank's backward, also if only towers train that it has not called:
        then its outputs get a graph.
        """
        if not (self._pass.recorded and torch.is_grad_enabled()):
            return
        tensors = tensors_in(output)
        if any(tensor.requires_grad for tensor in tensors):
            return
        old = {id(tensor) for tensor in tensors_in(given)}
        for tensor in tensors:
            if tensor.is_floating_point() and id(tensor) not in old:
                anchor = tensor.new_zeros((), requires_grad=True)
                _GivesGraph.apply(tensor, anchor)  # type: ignore[no-untyped-call]
