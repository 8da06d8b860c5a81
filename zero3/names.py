"""The names of a model's tensors, as in the unsharded model without torch's wrappers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from .access import states_of
from .core.parameters import own_name, parameters_of, wrapped_in
from .layer import Zero3Layer

__all__: list[str] = []

_EXTRA_STATE = "_extra_state"  # how state dicts call what a module's `get_extra_state` returns


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters (also released ones) and persistent buffers, in the order of the unsharded model's state dict."""
    for name, entry in named_entries(model):
        if isinstance(entry, Tensor):
            yield name, entry


def named_entries(model: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """As `named_tensors`, and each module that has extra state, under the name and at the place that the state dict gives it."""
    chunks = {id(part.parameter) for state in states_of(model) for chunk in state.chunks for part in chunk.parts}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Zero3Layer):
            continue
        dot = own_name(f"{prefix}.") if prefix else ""
        for name, parameter in parameters_of(module):
            if parameter is not None and id(parameter) not in chunks:
                yield dot + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield dot + name, buffer
        if has_extra_state(module):
            yield dot + _EXTRA_STATE, module


def innermost(model: nn.Module) -> nn.Module:
    """The model itself, where it was put into a layer as a whole, or into a wrapper of torch's."""
    while (inner := model.module if isinstance(model, Zero3Layer) else wrapped_in(model)) is not None:
        model = inner
    return model


def has_extra_state(module: nn.Module) -> bool:
    """Whether its class says what `get_extra_state` returns."""
    return type(module).get_extra_state is not nn.Module.get_extra_state
