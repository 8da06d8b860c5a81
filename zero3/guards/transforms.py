"""torch.func's transforms (grad, vjp, jvp, vmap, ...): right inside `resident`, and an error
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..core.autograd import transforms_under_way
from ..core.layer_state import LayerState

__all__: list[str] = []


def refuse_transforms(state: LayerState) -> None:
    """
    Raises:
        RuntimeError: A transform is under way, and the layer would have to be fetched and released
            within it.
    """
    if transforms_under_way() and not state.resident:
        raise RuntimeError(
            f"rank {state.communicator.rank}: layer {state.label} was called inside a torch.func "
            "transform (grad, vjp, jvp, vmap, jacrev, ...), which would still use its parameters "
            "after they are released. Transform inside `with zero3.resident(model):`, or compute "
            "with torch.autograd, as in loss.backward() and torch.autograd.grad(outputs, inputs)."
        )


@contextmanager
def transformable(states: Iterable[LayerState]) -> Iterator[None]:
    """Inside, transforms may call the layers, which are resident. They see parameters as constants.

    Otherwise what a transform returns would have a graph that ends at the parameters, and a
    backward through it would reduce gradients that other ranks may not have.
    """
    before = [(state, state.call) for state in states]
    for state, call in before:
        state.call = partial(_call, state, call)
    try:
        yield
    finally:
        for state, call in before:
            state.call = call


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
    places = [
        (sharded.sites.parameter, owner, name)
        for sharded in state.parameters
        for owner, name in sharded.sites.places
    ]
    ours = [
        (parameter, owner, name)
        for parameter, owner, name in places
        if owner._parameters.get(name) is parameter
    ]
    for parameter, owner, name in ours:  # others were put there by torch.func.functional_call
        owner._parameters[name] = parameter.detach()  # type: ignore[assignment]
    try:
        return call(module, *args, **kwargs)
    finally:
        for parameter, owner, name in ours:
            owner._parameters[name] = parameter
