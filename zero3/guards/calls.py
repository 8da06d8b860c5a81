"""What a layer refuses when it is called: torch.func's transforms (grad, vjp, jvp, vmap, ...)
outside of `resident`, and parameters whose `requires_grad` was changed one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from ..core.autograd import transforms_under_way
from ..core.layer_state import LayerState
from ..modules import named

__all__: list[str] = []


def refuse_transforms(state: LayerState) -> None:
    """
    Raises:
        RuntimeError: A transform is under way, and the layer would have to be fetched and released
            within it.
    """
    if transforms_under_way() and not state.pins.resident:
        raise RuntimeError(
            f"rank {state.communicator.rank}: layer {state.label} was called inside a torch.func "
            "transform (grad, vjp, jvp, vmap, jacrev, ...), which would still use its parameters "
            "after they are released. Transform inside `with zero3.resident(model):`, or compute "
            "with torch.autograd, as in loss.backward() and torch.autograd.grad(outputs, inputs)."
        )


@contextmanager
def transformable(states: Iterable[LayerState]) -> Iterator[None]:
    """Inside, the pinned layers are resident. Transforms may call them, and see parameters as
    constants.

    Otherwise what a transform returns would have a graph that ends at the parameters, and a
    backward through it would reduce gradients that other ranks may not have.
    """
    with ExitStack() as left:
        for state in states:
            left.enter_context(state.resident_by(partial(_call, state, state.call)))
        yield


def _call(
    state: LayerState,
    call: Callable[..., Any],
    module: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not transforms_under_way():
        return call(module, *args, **kwargs)
    ours = [
        (sharded.sites.parameter, owner, name)
        for sharded in state.parameters
        for owner, name in sharded.sites.places
        if owner._parameters.get(name) is sharded.sites.parameter
    ]
    for parameter, owner, name in ours:  # others were put there by torch.func.functional_call
        owner._parameters[name] = parameter.detach()  # type: ignore[assignment]
    try:
        return call(module, *args, **kwargs)
    finally:
        for parameter, owner, name in ours:
            owner._parameters[name] = parameter


def check_requires_grad(computing: LayerState, layers: Iterable[LayerState]) -> None:
    """Compares `requires_grad` of a layer's parameters with their chunks', before a forward with
    gradients: a chunk is trained or frozen as a whole, so a change of one parameter can't count.

    It does not look earlier, because tools switch adapters off and on again. If no parameter of the
    model (`layers`) needs a gradient, as inside peft's disable_adapter(), no gradient can be wrong.

    Raises:
        RuntimeError: The `requires_grad` of a parameter of `computing` differs from its chunk's.
    """
    if not torch.is_grad_enabled():
        return
    changed = computing.parameters.find_toggled()
    if not changed or not any(
        sharded.sites.parameter.requires_grad for state in layers for sharded in state.parameters
    ):
        return
    names = named(
        [
            f"{sharded.sites.name!r} ({'frozen' if sharded.chunk.trains else 'trained'} now)"
            for sharded in changed
        ]
    )
    raise RuntimeError(
        f"rank {computing.communicator.rank}: layer {computing.label} was to compute with "
        f"gradients, but requires_grad has changed for {names}. A chunk is trained or frozen as a "
        "whole. Set requires_grad back before a forward with gradients (peft: leave "
        "disable_adapter(), or set_adapter() the adapter that trains), compute under "
        "torch.no_grad(), choose what trains with zero3.set_trainable(model, select) between two "
        "steps, or use requires_grad_ of the whole chunk (for chunk in layer.parameters(): ...)."
    )
