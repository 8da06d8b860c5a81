"""The process's one hook on optimizers' steps. The first step of each shows whether it trains what
its maker believes: what looks wrong is a warning from rank 0. Each step leaves alone what no
gradient has reached, and passes the conductors of its layers while somebody listens.

There is no collective here, but for stage 1, where the first look at a gradient reduces all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..comm.communicator import is_first
from ..comm.ring import OUTSIDE, STEP
from ..core.chunk_gradient import reduce_deferred
from ..core.collectives import Use
from ..core.layer_state import LayerState
from ..policy import shards_gradients
from .marks import Owner, ignored_by, state_of
from .unreached import LeftAlone, spans_unreached

__all__: list[str] = []

_log = logging.getLogger("zero3")
_LOW = (torch.bfloat16, torch.float16)
_SHOWN, _SHOWN_AT_MOST = 4, 40  # names in a warning


class Steps:
    """What torch calls before each step of any optimizer in this process.

    While anybody listens, a step passes the conductors of the layers that it is of, and one of
    layers that stay fetched is refused.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Optimizer, _Watched] = WeakKeyDictionary()
        self._warned: WeakSet[object] = WeakSet()  # models' first layers, and their backwards
        self._listeners: list[object] = []

    def listen(self, listener: object) -> None:
        self._listeners.append(listener)

    def forget(self, listener: object) -> None:
        self._listeners.remove(listener)

    def warns_first_of(self, layer: object) -> bool:
        """Whether nothing has asked this before of the model whose first layer it is."""
        first = layer not in self._warned
        self._warned.add(layer)
        return first

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if self._listeners:
            _refuse_pinned(optimizer)
            for layer in layers_stepped_by(optimizer, ignored_by):
                layer.conductor.conduct(Use(layer, "an optimizer's step"))
        steps = self._known.get(optimizer)
        held = 0
        for group in optimizer.param_groups:
            held += len(group["params"])
        if steps is None or steps.held != held:
            # zero3's own have others in them, which are looked at themselves
            if type(optimizer).__module__.startswith("zero3."):
                return None
            first, steps = steps is None, _Watched(optimizer, self._warned)
            self._known[optimizer] = steps
            if first and any(state.log.ring is not None for state in steps.states()):
                optimizer.register_step_pre_hook(partial(self._tell, STEP, "step"))
                optimizer.register_step_post_hook(partial(self._tell, OUTSIDE, "outside"))
            for text in steps.problems(optimizer) if first else ():
                _log.warning("%s", text)
        steps.left = None
        if steps.owners and (len(args) > 1 or kwargs):
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if callable(closure):
                return steps.begin_in_closure(closure, args, kwargs)
        for owner in steps.owners:
            state = owner()
            for account in state.gradients.accounts.values() if state is not None else ():
                if account.unreached.maybe or account.owed:
                    return steps.begin(optimizer, args, kwargs)
        return None

    def _tell(self, direction: int, mark: str, optimizer: Optimizer, *_: Any) -> None:
        """The models' rings: a step begins, or is over."""
        for log in {state.log for state in self._known[optimizer].states()}:
            log.step(direction, mark)


def steps_seen() -> Steps:
    """Lets torch show each optimizer before its steps, from now on in this process."""
    register: Any = register_optimizer_step_pre_hook
    if not hasattr(register, "zero3_looks"):
        register.zero3_looks = Steps()
        register(register.zero3_looks)
    return register.zero3_looks  # type: ignore[no-any-return]


def held_by(*optimizers: Any) -> list[Tensor]:
    """Returns the parameters in all groups of the optimizers."""
    return [p for each in optimizers for group in each.param_groups for p in group["params"]]


def layers_stepped_by(optimizer: Optimizer, *others: Callable[[object], Any]) -> list[LayerState]:
    """The layers that its parameters belong to. `others`: tell the layer of a parameter that is in
    none of its chunks.
    """
    found = (known(p) for p in held_by(optimizer) for known in (state_of, *others))
    return list(dict.fromkeys(each for each in found if isinstance(each, LayerState)))


def _refuse_pinned(optimizer: Optimizer) -> None:
    """Chunks would change, and not the parameters that are shown. On one rank these are the
    chunks.
    """
    for held in held_by(optimizer):
        state = state_of(held) if held.requires_grad and held.grad is not None else None
        if not isinstance(state, LayerState) or not state.pinned:
            continue
        if not all(chunk.resident for chunk in state.chunks):
            raise RuntimeError(
                f"the {type(optimizer).__name__} would step layer {state.label} inside "
                "zero3.full_params or zero3.resident, which keep the old values: leave the context "
                "before the step"
            )


class _Arguments(dict[str, Any]):
    """The keyword arguments of a step, which bring what it leaves alone to its end. A subclass's
    step may call its base's, which then has its own; one that raises takes its own with it.
    """

    def __init__(self, kwargs: Any, left: LeftAlone) -> None:
        super().__init__(kwargs)
        self.left = left


class _Watched:
    """The steps of one optimizer. It does not hold the optimizer, nor a model."""

    def __init__(self, optimizer: Optimizer, warned: WeakSet[object]) -> None:
        """`warned`: of parameters that no gradient reached: the backwards of models."""
        self.held = len(held_by(optimizer))
        self.owners = [Owner(state) for state in layers_stepped_by(optimizer)]
        self.left: LeftAlone | None = None  # of the step that has begun last
        self._warned = warned
        self._ends = False  # whether it hears of the steps' ends

    def states(self) -> list[LayerState]:
        return [state for owner in self.owners if (state := owner()) is not None]

    def problems(self, optimizer: Optimizer) -> list[str]:
        """What rank 0 warns of before the first step."""
        states = self.states()
        if not states or not is_first(states[0].communicator):
            return []
        return [*empty_groups(optimizer, states), *_low_masters(optimizer, states)]

    def begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """The gradients are there, or will be when somebody asks (stage 1). Returns the arguments
        of the step.
        """
        left = self.left = LeftAlone()
        self._look(optimizer, left)
        return args, _Arguments(kwargs, left)

    def _look(self, optimizer: Optimizer, left: LeftAlone) -> None:
        states = self.states()
        if any(state.gradients.owed() and not shards_gradients(state.policy) for state in states):
            reduce_deferred(parameter.grad for parameter in held_by(optimizer))
        if any(
            each.unreached.maybe for state in states for each in state.gradients.accounts.values()
        ):
            self._warn_of_unreached(states)
        spans = spans_unreached(states)
        if not spans or getattr(vars(optimizer).get("step"), "zero3_leaves_alone", False):
            return
        if not self._ends:
            optimizer.register_step_post_hook(lambda stepped, _, given: self._end(stepped, given))
            self._ends = True
        left.put_aside(optimizer, spans)

    def _end(self, optimizer: Optimizer, kwargs: Any) -> None:
        # another hook may have put others in place of the arguments
        left = kwargs.left if isinstance(kwargs, _Arguments) else self.left
        if left is not None:
            left.put_back(optimizer)

    def _warn_of_unreached(self, states: list[LayerState]) -> None:
        backward = states[0].gradients.backward()
        if backward in self._warned or not is_first(states[0].communicator):
            return
        if names := list(_unreached(states)):
            self._warned.add(backward)
            names[_SHOWN_AT_MOST:] = ["..."] * (len(names) > _SHOWN_AT_MOST)
            _log.warning(
                "no gradient reached these parameters before the optimizer's step, on any rank: %s."
                " They stay as they are, as in plain torch. (One that is reached in some steps only"
                " and shares a chunk with others shares the count of steps of an optimizer such as"
                " AdamW. With align among the options of zero3.param_groups it has its own.)",
                ", ".join(names),
            )

    def begin_in_closure(self, closure: Callable[[], Any], args: Any, kwargs: Any) -> Any:
        """An optimizer's closure may run the backward."""
        optimizer = args[0]
        left = self.left = LeftAlone()

        def looked_at() -> Any:
            left.put_back(optimizer)
            loss = closure()
            self._look(optimizer, left)
            return loss

        step = _Arguments(kwargs, left)
        if "closure" in kwargs:
            step["closure"] = looked_at
            return args, step
        return (args[0], looked_at, *args[2:]), step


def _unreached(states: list[LayerState]) -> Iterator[str]:
    for state in states:
        for sharded in state.parameters:
            chunk, name = sharded.chunk, sharded.sites.name
            trains = chunk.shard.requires_grad and name not in chunk.parts.left_out
            if trains and sharded.index in state.gradients.accounts[chunk].unreached.slots:
                yield f"{state.label}.{name}"


def empty_groups(optimizer: Optimizer, states: list[LayerState]) -> Iterator[str]:
    """Of groups chosen by names or shapes among chunks, which hold parameters of all shapes."""
    trained = [
        (state, sharded) for state in states for sharded in state.parameters if sharded.chunk.trains
    ]
    alike = len({sharded.stand_in.ndim for _, sharded in trained}) < 2
    if alike or any(
        sharded.chunk.parts.divided for _, sharded in trained
    ):  # `param_groups` divides
        return
    names = [f"{state.label}.{sharded.sites.name}" for state, sharded in trained]
    names[_SHOWN:] = ["..."] * (len(names) > _SHOWN)
    for number, group in enumerate(optimizer.param_groups):
        if group["params"]:
            continue
        yield (
            f"{label_of(optimizer, number)} has no parameters, and another group has those that "
            f"were meant for it: chunks hold {', '.join(names)} together. Choose by the "
            "parameters' own names and shapes: zero3.param_groups(model, lambda name, info: {...})"
        )


def label_of(optimizer: Optimizer, number: int) -> str:
    """A group for messages, with the options that set it apart from others."""
    group = optimizer.param_groups[number]
    others = [other for other in optimizer.param_groups if other is not group]
    own = [
        f"{key}={value!r}"
        for key, value in group.items()
        if key != "params" and any(key not in o or o[key] is not value for o in others)
    ]
    kind = type(optimizer).__name__
    return f"group {number} of the {kind} ({', '.join(own) or 'no options of its own'})"


def _low_masters(optimizer: Optimizer, states: list[LayerState]) -> Iterator[str]:
    """Of chunks in 16 bits. Optimizers of other libraries may round them stochastically."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    held = set(map(id, held_by(optimizer)))
    for state in states:
        for sharded in state.parameters:
            chunk, dtype = sharded.chunk, sharded.chunk.shard.dtype
            known = any(id(part.parameter) in held for part in chunk.parts)
            if known and chunk.trains and dtype in _LOW:
                remedy = (
                    "Keep copies in float32: zero3.ShardingPolicy(master_dtype=torch.float32), or "
                    "load the model with dtype=torch.float32, and let it compute in "
                    f"param_dtype={dtype}"
                    if state.policy.master_dtype in (None, dtype)
                    else "They were frozen when the model was sharded, so master_dtype made no "
                    "copies: shard while they train, and freeze them afterwards by "
                    "zero3.set_trainable"
                )
                yield (
                    f"the {type(optimizer).__name__} updates {state.label}.{sharded.sites.name} "
                    f"and others in {dtype}, where updates smaller than half of the last bit are "
                    f"lost. {remedy}"
                )
                return
