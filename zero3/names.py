"""The names of a model's tensors, as in the unsharded model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from .access import states_of
from .core.parameters import parameters_of
from .layer import Zero3Layer

__all__: list[str] = []


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters (also released ones) and persistent buffers, in the order of the unsharded model's state dict."""
    chunks = {id(part.parameter) for state in states_of(model) for chunk in state.chunks for part in chunk.parts}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Zero3Layer):
            continue
        dot = f"{prefix}." if prefix else ""
        for name, parameter in parameters_of(module):
            if parameter is not None and id(parameter) not in chunks:
                yield dot + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield dot + name, buffer
