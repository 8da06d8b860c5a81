"""What was left on the meta device and is in no chunk: loaded values put in place, buffers computed as the model does."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.layer_state import LayerState
from ..core.module_overrides import Override
from ..layer import is_layer

__all__: list[str] = []

_log = logging.getLogger("zero3")


@torch.no_grad()
def put(model: nn.Module, old: Tensor, value: Tensor) -> None:
    """`value` into `old`; if that is on meta, in its stead, in all places that it has (it may be shared)."""
    if not old.is_meta:
        old.copy_(value)
        return
    new = nn.Parameter(value, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else value
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for attribute in [attribute for attribute, tensor in held.items() if tensor is old]:
                setattr(module, attribute, new)


def initialise(model: nn.Module, states: list[LayerState]) -> list[tuple[str, Tensor]]:
    """Gives values to the non-persistent buffers on meta; returns those that it could compute, with their names.

    A checkpoint does not hold them (rotary frequencies, masks, positions). They come from the hook that sets a module's
    values: `_init_weights` of the transformers model around it, else the module's own `reset_parameters`. It runs on
    the CPU, as in `from_pretrained`, and on a twin of the module, where all that is not wanted is on meta.
    """
    hooks = _hooks_of(model)
    filled: list[tuple[str, Tensor]] = []
    for state in states:
        wanted: dict[nn.Module, dict[str, str]] = {}
        for owner, attribute, name in state.meta_buffers:
            buffer = owner._buffers.get(attribute)
            if buffer is not None and buffer.is_meta and attribute in owner._non_persistent_buffers_set:
                wanted.setdefault(owner, {})[attribute] = name
        for owner, attributes in wanted.items():
            computed = _compute(owner, list(attributes), hooks.get(owner))
            for attribute, value in computed.items():
                owner._buffers[attribute] = value.to(state.device)
                filled.append((f"{attributes[attribute]} of layer {state.label}", owner._buffers[attribute]))  # type: ignore[arg-type]
    return filled


def _hooks_of(model: nn.Module) -> dict[nn.Module, Callable[[nn.Module], Any]]:
    """For each module, the `_init_weights` of the nearest model around it: models hold models with hooks of their own."""
    hooks: dict[nn.Module, Callable[[nn.Module], Any]] = {}

    def walk(module: nn.Module, hook: Callable[[nn.Module], Any] | None) -> None:
        own = None if is_layer(module) else getattr(module, "_init_weights", None)
        hook = own if callable(own) else hook
        if hook is not None:
            hooks.setdefault(module, hook)
        for child in module.children():
            walk(child, hook)

    walk(model, None)
    return hooks


def _compute(owner: nn.Module, attributes: list[str], hook: Callable[[nn.Module], Any] | None) -> dict[str, Tensor]:
    blank = {attribute: torch.empty_like(owner._buffers[attribute], device="cpu") for attribute in attributes}  # type: ignore[arg-type]
    versions = {attribute: buffer._version for attribute, buffer in blank.items()}
    try:
        copy = twin(owner)
        copy._buffers.update(blank)
        initialise_twin = getattr(copy, "reset_parameters", None) if hook is None else lambda: hook(copy)
        if not callable(initialise_twin):
            return {}
        with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            initialise_twin()
    except Exception as error:  # it stays on meta, and the first forward says so by name
        _log.warning("%s: its buffers %s could not be computed: %s", type(owner).__name__, ", ".join(attributes), error)
        return {}
    computed = {}
    for attribute in attributes:
        value = copy._buffers.get(attribute)
        if value is not None and not value.is_meta and (value is not blank[attribute] or value._version != versions[attribute]):
            computed[attribute] = value.to(blank[attribute].dtype)
    return computed


def twin(module: nn.Module) -> nn.Module:
    """The unwrapped module and those in it once more, with every tensor on meta: whoever is given it may write what he likes."""
    if is_layer(module):
        return twin(module.module)  # type: ignore[arg-type]
    copy = type(module).__new__(type(module))
    copy.__dict__ = {name: value for name, value in module.__dict__.items() if not isinstance(value, Override)}
    copy.__dict__["_state_dict_pre_hooks"] = OrderedDict()
    released = {name: value for name, value in vars(module).items() if isinstance(value, nn.Parameter)}
    for name in released:
        del copy.__dict__[name]
    parameters = {name: value for name, value in module._parameters.items() if not name.startswith(("trainable_chunk", "frozen_chunk"))}
    copy.__dict__["_parameters"] = {
        name: None if value is None else nn.Parameter(torch.empty(value.shape, dtype=value.dtype, device="meta"), requires_grad=False)
        for name, value in {**parameters, **released}.items()
    }
    copy.__dict__["_buffers"] = {
        name: None if value is None else torch.empty_like(value, device="meta") for name, value in module._buffers.items()
    }
    copy.__dict__["_modules"] = {name: None if child is None else twin(child) for name, child in module._modules.items()}
    return copy
