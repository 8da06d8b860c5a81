"""Steps each chunk inside backward, as soon as its gradient has landed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn

import torch
from torch import Tensor, nn

from ..core.chunk_gradient import CallersMistake, DeferredGradient
from ..guards.marks import Owner, state_of
from ..optim.several import held_by
from ..stores.files import Files
from .turns import Turn, Turns

__all__: list[str] = []


def check_unstepped(optimizer: torch.optim.Optimizer) -> None:
    """
    Raises:
        ValueError: Another living optimizer steps one of its parameters inside backward.
    """
    if _stepped_already(optimizer) is None:
        return
    gc.collect()  # one that was deleted may be part of a cycle
    if (found := _stepped_already(optimizer)) is not None:
        raise ValueError(
            f"layer {found[0]} is stepped inside backward by another living {found[1]} "
            "(offload_optimizer with in_backward=True). That one uses the gradients up, and none "
            f"would be left for this {type(optimizer).__name__}. Give each chunk to one optimizer, "
            "or first delete the other one, and schedulers and all else that refers to it"
        )


def _stepped_already(optimizer: torch.optim.Optimizer) -> tuple[str, str] | None:
    """A layer's label, and the class of the optimizer that steps it. (No object: an error's
    traceback would keep it alive.)
    """
    for parameter in held_by(optimizer):
        stepped_by = getattr(parameter, "zero3_stepped_in_backward", None)
        if isinstance(stepped_by, Owner) and (other := stepped_by()) is not None:
            return state_of(parameter).label, type(other).__name__
    return None


class InBackward:
    """Hooks on an optimizer's parameters. A parameter that is stepped has a gradient without values
    until `optimizer.step()`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        turns: Turns,
        step: Callable[[torch.optim.Optimizer], object],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._turns, self._step = turns, step
        self._turn_of: dict[int, Turn] = {}
        self._made: list[Turn] = []  # since the last `optimizer.step()`, in order
        # the same of the step before, which the next one is expected to be like
        self._before: list[Turn] = []
        for turn in turns.of(optimizer):
            for number, parameters in turn.parameters.items():
                for parameter in parameters:
                    if state_of(parameter) is not None and parameter.requires_grad:
                        self._turn_of[id(parameter)] = replace(
                            turn, parameters={number: [parameter]}
                        )
                        _call_when_landed(parameter, self)
                        parameter.zero3_stepped_in_backward = Owner(optimizer)  # type: ignore[attr-defined]
            if turn.chunk is None or not isinstance(store := turn.chunk.store, Files):
                continue
            parts = [part.parameter for part in turn.chunk.parts]
            if all(id(parameter) in self._turn_of for parameter in parts):
                store.is_used_at_once(partial(_steps, weakref.ref(self), weakref.ref(parts[0])))

    def steps(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is stepped when its gradient lands. (A single rank keeps nothing
        for later under `no_sync`.)
        """
        state = state_of(parameter)
        return self._optimizer() is not None and state is not None and not state.gradients.deferrals

    def landed(self, parameter: nn.Parameter) -> None:
        optimizer, turn = self._optimizer(), self._turn_of[id(parameter)]
        if optimizer is None or not self.steps(parameter):
            return
        if turn in self._made:
            raise _second_gradient(state_of(parameter).label)
        self._made.append(turn)
        following = next(iter(self._before[len(self._made) :]), None)
        if following in self._made:
            following = None
        self._turns.make(optimizer, turn, following, lambda: self._step(optimizer))
        parameter.grad = None
        parameter.grad = DeferredGradient.like(parameter, _Used)

    def finish(self) -> None:
        """Called by `optimizer.step()`: the gradients that were used are gone. Likewise by a load,
        since a backward may have raised.
        """
        for turn in self._made:
            for parameter in turn.all():
                if isinstance(parameter.grad, DeferredGradient):
                    parameter.grad = None
        self._before, self._made = self._made, []


def _call_when_landed(parameter: nn.Parameter, hooks: InBackward) -> None:
    reference = weakref.ref(hooks)  # the cycle collector can't see into hooks

    def landed(leaf: Tensor) -> None:
        if (hooks := reference()) is not None and isinstance(leaf, nn.Parameter):
            hooks.landed(leaf)

    parameter.register_post_accumulate_grad_hook(landed)  # type: ignore[no-untyped-call]


def _steps(
    hooks: Callable[[], InBackward | None], parameter: Callable[[], nn.Parameter | None]
) -> bool:
    found, one = hooks(), parameter()
    return found is not None and one is not None and found.steps(one)


class _Used:
    """Stands where a deferred gradient has the layer that will reduce it."""

    holds = 0

    def chunk_changed(self, label: str) -> NoReturn:
        raise _second_gradient(label)

    def reduce_deferred(self) -> NoReturn:
        raise CallersMistake(
            "this gradient is used up: its chunk was stepped inside backward (offload_optimizer "
            "with in_backward=True). clip_grad_norm_, GradScaler, named_gradients, "
            "full_gradients and whatever else reads it come too late. Leave in_backward out for "
            "that"
        )


def _second_gradient(label: str) -> CallersMistake:
    """The error for a layer that is reached a second time."""
    return CallersMistake(
        f"a chunk of layer {label} got a second gradient before optimizer.step(), and was stepped "
        "by the first one already (offload_optimizer with in_backward=True). Run the backwards "
        "of all micro-batches but the last inside zero3.no_sync(model), add no penalty over "
        "chunks, and call each layer in one forward a step; or leave in_backward out. This "
        "training has to go on from a checkpoint"
    )
