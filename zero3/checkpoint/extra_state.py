"""Saves and loads the extra state of modules (`get_extra_state`). Rank 0's extra state counts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.agreement import Meets, agreeing, exchange_texts
from ..comm.communicator import is_first
from ..comm.plain_values import decode, dtype_named, encode, name_of, unreadable
from ..core.layer_state import LayerState
from ..names import named_entries

__all__: list[str] = []


def extra_states_of(model: nn.Module) -> dict[str, Any]:
    """Returns the extra state of every module on this rank, by its name in the unwrapped model's
    state dict.
    """
    return {name: module.get_extra_state() for name, module in extra_state_modules(model).items()}


def copied(value: Any) -> Any:
    """Returns `value` with every tensor in its dicts, lists and tuples replaced by a copy on the
    CPU.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) is dict:
        return {key: copied(held) for key, held in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value


def extra_state_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that have extra state, by the same names."""
    return {name: entry for name, entry in named_entries(model) if isinstance(entry, nn.Module)}


def takers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules whose class defines `set_extra_state`. (torch's own `set_extra_state`
    raises.)
    """
    own = nn.Module.set_extra_state
    modules = extra_state_modules(model).items()
    return {name: each for name, each in modules if type(each).set_extra_state is not own}


def encoded(values: Mapping[str, Any], tensors: list[Tensor]) -> dict[str, Any]:
    """Converts `values` to what JSON can hold. Tensors are appended to `tensors`, and their numbers
    stand for them. Raises TypeError if a value could only be pickled, or a tensor has no values.
    The error names it.
    """

    def put(tensor: Tensor) -> int:
        if (problem := unreadable(tensor)) is not None:
            raise TypeError(f"a tensor of {name} {problem}")
        tensors.append(tensor.detach())
        return len(tensors) - 1

    found = {}
    for name, value in values.items():  # `put` tells the name in its errors
        found[name] = encode(value, name, put)
    return found


def sent_from_rank_0(first: LayerState, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns rank 0's `values` on every rank, with tensors on the CPU. Every rank calls it. Raises
    TypeError if a value could only be pickled. Every rank raises it.
    """
    communicator, device = first.communicator, first.device
    tensors: list[Tensor] = []
    text = ""
    with agreeing(first, "the extra state of modules"):
        if is_first(communicator):
            found = encoded(values, tensors)
            described = [[name_of(tensor.dtype), list(tensor.shape)] for tensor in tensors]
            text = json.dumps([found, described])
    found, described = json.loads(exchange_texts(first, text)[0])
    received = []
    for number, (dtype, shape) in enumerate(described):
        value = torch.empty(shape, dtype=dtype_named(dtype), device=device)
        if is_first(communicator):
            value.copy_(tensors[number])
        if value.numel():
            communicator.broadcast(value.view(-1).view(torch.uint8))
        received.append(value.cpu())
    return {name: decode(value, received.__getitem__) for name, value in found.items()}


def set_extra_states(
    model: nn.Module, values: Mapping[str, Any], among: Meets, caller: str
) -> None:
    """Gives each module its own value. Every rank calls it, with the same `values`, after
    everything else has been loaded. If a module refuses its value, every rank raises its error.
    """
    takers = takers_of(model)
    if not takers:
        return
    with agreeing(among, f"the extra state that {caller} sets"):
        for name, value in values.items():
            if name in takers:
                takers[name].set_extra_state(value)
