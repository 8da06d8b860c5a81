"""The first step of an optimizer shows whether it trains what its maker believes. What looks wrong
is a warning from rank 0. There is no collective here. Later steps are looked at only while somebody
listens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..comm.communicator import is_first
from ..core.collectives import Use
from ..core.layer_state import LayerState
from .marks import ignored_by, state_of

__all__: list[str] = []

_log = logging.getLogger("zero3")
_LOW = (torch.bfloat16, torch.float16)
_SHOWN = 4  # names in a warning


class Steps:
    """What torch calls before each step of any optimizer in this process.

    While anybody listens, a step passes the conductors of the layers that it is of.
    """

    def __init__(self) -> None:
        self._known: WeakSet[Optimizer] = WeakSet()
        self._listeners: list[object] = []

    def listen(self, listener: object) -> None:
        self._listeners.append(listener)

    def forget(self, listener: object) -> None:
        self._listeners.remove(listener)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for state in _layers_of(optimizer, ignored_by) if self._listeners else ():
            state.conductor.conduct(Use(state, "an optimizer's step"))
        # zero3's own have others in them, which are looked at themselves
        if optimizer in self._known or type(optimizer).__module__.startswith("zero3."):
            return
        self._known.add(optimizer)
        states = _layers_of(optimizer)
        if states and is_first(states[0].communicator):
            held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
            for text in (*empty_groups(optimizer, states), *_low_masters(optimizer, states, held)):
                _log.warning("%s", text)


def steps_seen() -> Steps:
    """Lets torch show each optimizer before its steps, from now on in this process."""
    register: Any = register_optimizer_step_pre_hook
    if not hasattr(register, "zero3_looks"):
        register.zero3_looks = Steps()
        register(register.zero3_looks)
    return register.zero3_looks  # type: ignore[no-any-return]


def _layers_of(optimizer: Optimizer, *others: Callable[[object], Any]) -> list[LayerState]:
    """`others`: tell the layer of a parameter that is in none of its chunks."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    found = (known(p) for p in held for known in (state_of, *others))
    return list(dict.fromkeys(each for each in found if isinstance(each, LayerState)))


def empty_groups(optimizer: Optimizer, states: list[LayerState]) -> Iterator[str]:
    """Of groups chosen by names or shapes among chunks, which hold parameters of all shapes."""
    trained = [
        (state, sharded) for state in states for sharded in state.parameters if sharded.chunk.trains
    ]
    alike = len({sharded.stand_in.ndim for _, sharded in trained}) < 2
    if alike or any(sharded.chunk.divided for _, sharded in trained):  # `param_groups` divides
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


def _low_masters(
    optimizer: Optimizer, states: list[LayerState], held: dict[int, Any]
) -> Iterator[str]:
    """Of chunks in 16 bits. Optimizers of other libraries may round them stochastically."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    for state in states:
        for sharded in state.parameters:
            chunk, dtype = sharded.chunk, sharded.chunk.shard.dtype
            known = any(id(part.parameter) in held for part in chunk.parts)
            if known and chunk.trains and dtype in _LOW:
                yield (
                    f"the {type(optimizer).__name__} updates {state.label}.{sharded.sites.name} "
                    f"and others in {dtype}, where updates smaller than half of the last bit are "
                    "lost. Keep copies in float32: zero3.ShardingPolicy(master_dtype="
                    "torch.float32), or load the model with dtype=torch.float32, and let it "
                    f"compute in param_dtype={dtype}"
                )
                return
