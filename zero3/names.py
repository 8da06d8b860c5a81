"""The names that a model's tensors have in the unsharded model without torch's wrappers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from .access import states_of
from .core.layer_state import parts_of
from .core.parameters import parameters_of
from .layer import is_layer
from .modules import own_name, unwrapped, wrapped_in

__all__: list[str] = []

_EXTRA_STATE = "_extra_state"  # the name of a module's extra state in torch's state dicts


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters (also released ones) and persistent buffers, in the order of the
    unsharded model's state dict.
    """
    for name, entry in named_entries(model):
        if isinstance(entry, Tensor):
            yield name, entry


def named_entries(model: nn.Module) -> Iterator[tuple[str, Tensor | nn.Module]]:
    """Yields the same as `named_tensors`, and each module that has extra state, with the name and
    the place of that in the state dict.
    """
    chunks = set(map(id, parts_of(states_of(model))))
    for prefix, entry in model.named_modules(remove_duplicate=False):
        module = unwrapped(entry)
        dot = own_name(f"{prefix}.") if prefix else ""
        for name, parameter in parameters_of(module):
            if parameter is not None and id(parameter) not in chunks:
                yield dot + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield dot + name, buffer
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield dot + _EXTRA_STATE, module


def innermost(model: nn.Module) -> nn.Module:
    """Returns the model inside a layer around the whole model, and inside torch's wrappers."""
    while (inner := unwrapped(model) if is_layer(model) else wrapped_in(model)) is not None:
        model = inner
    return model
