"""The whole model as one state dict on rank 0, and back: layer by layer, never more than one at a time."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..access import agree_to_gather, states_of
from ..comm.agreement import agree
from ..core.layer_state import LayerState
from ..core.pinning import pin, pin_unloaded, unpin, write_back
from ..names import named_tensors
from .meta_buffers import initialise, put

__all__: list[str] = []

_LONG = 2**30  # bytes of a model that takes long enough to be watched


def full_state_dict(model: nn.Module, *, rank0_only: bool = True, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The state dict of the unwrapped model, on the CPU: its own names, shapes and order.

    Every rank calls it. One layer at a time is gathered and copied. A tied parameter stands under each of its names.

    Args:
        model: Any model that contains zero3 layers.
        rank0_only: Only rank 0 keeps the tensors; the others get `{}`.
        dtype: Floating tensors are converted to it. None: as they are stored.

    Returns:
        Name to tensor.

    Raises:
        ValueError: Nothing in `model` is sharded.
        TypeError: `dtype` is no dtype; on every rank.

    Example::

        weights = zero3.full_state_dict(model, dtype=torch.bfloat16)
        if rank == 0:
            torch.save(weights, f"{directory}/weights.pt")
    """
    states = states_of(model)
    keeps = not rank0_only or states[0].communicator.rank == 0
    agree_to_gather(states, "full_state_dict", not_a_dtype(dtype))
    values: dict[int, Tensor] = {}
    for state in _watched(states, "gathering layers"):
        pin(state)
        try:
            if keeps:
                values.update({id(b.sites.parameter): _copy(b.value, dtype) for b in state.parameters})
        finally:
            unpin(state)
    if not keeps:
        return {}
    return {name: values[id(tensor)] if id(tensor) in values else _copy(tensor, dtype) for name, tensor in named_tensors(model)}


def load_full_state_dict(model: nn.Module, state_dict: Mapping[str, Tensor] | None, *, strict: bool = True) -> None:
    """Fills a model from rank 0's state dict, which has the names of the unwrapped model. The inverse of `full_state_dict`.

    Every rank calls it. One layer at a time is gathered, changed and scattered.

    Args:
        model: Any model that contains zero3 layers, with values or built on the meta device.
        state_dict: Name to tensor. Only rank 0's counts; other ranks may pass `{}` or None.
        strict: Missing and unknown names are an error; otherwise they are left alone.

    Raises:
        ValueError: Missing or unknown names, or other shapes: all in one error, on every rank, before anything changes.

    Example::

        weights = torch.load(f"{directory}/weights.pt", weights_only=True) if rank == 0 else None
        zero3.load_full_state_dict(model, weights)
    """
    states = states_of(model)
    first = states[0]
    given: Mapping[str, Any] = state_dict if first.communicator.rank == 0 and state_dict is not None else {}
    error = ValueError(problems) if first.communicator.rank == 0 and (problems := _problems(model, states, given, strict)) else None
    agree(first.communicator, first.device, "load_full_state_dict", [], error)
    values = {id(tensor): given[name] for name, tensor in named_tensors(model) if name in given}
    for state in _watched(states, "loading layers"):
        _load_layer(state, values)
    _load_others(model, states, values)


@torch.no_grad()
def _load_others(model: nn.Module, states: list[LayerState], values: Mapping[int, Tensor]) -> None:
    """What no layer owns: buffers, mostly. Those that no state dict holds are computed, if they are on meta."""
    first = states[0]
    owned = {id(sharded.sites.parameter) for state in states for sharded in state.parameters}
    others = {id(tensor): tensor for _, tensor in named_tensors(model) if id(tensor) not in owned}
    given = torch.tensor([key in values for key in others], dtype=torch.uint8, device=first.device)
    if others:
        first.communicator.broadcast(given)
    for (key, tensor), is_given in zip(others.items(), given.tolist(), strict=True):
        if is_given:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=first.device)
            if first.communicator.rank == 0:
                value.copy_(values[key])
            first.communicator.broadcast(value)
            put(model, tensor, value)
    for _, value in initialise(model, states):
        first.communicator.broadcast(value)


@torch.no_grad()
def _load_layer(state: LayerState, values: Mapping[int, Tensor]) -> None:
    pin_unloaded(state)
    try:
        for sharded in state.parameters:
            if id(sharded.sites.parameter) in values:
                sharded.value.copy_(values[id(sharded.sites.parameter)])
        write_back(state)
    finally:
        unpin(state)


def _watched(states: list[LayerState], doing: str) -> Iterable[LayerState]:
    """A progress bar for those who wait: of a large model, at rank 0's terminal, where tqdm is installed."""
    nbytes = sum(state.full_nbytes() for state in states)
    if states[0].communicator.rank != 0 or nbytes < _LONG or not sys.stderr.isatty():
        return states
    try:
        bar = importlib.import_module("tqdm").tqdm
    except ImportError:
        return states
    return bar(states, desc=f"zero3: {doing}", unit="layer", leave=False)  # type: ignore[no-any-return]


def not_a_dtype(dtype: Any) -> TypeError | None:
    """The mistake, to be raised where all ranks hear of it."""
    return None if dtype is None or isinstance(dtype, torch.dtype) else TypeError(f"dtype must be a torch.dtype or None, found {dtype!r}")


def _copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return torch.empty(tensor.shape, dtype=target).copy_(tensor.detach())


def _problems(model: nn.Module, states: list[LayerState], given: Mapping[str, Any], strict: bool) -> str:
    expected = dict(named_tensors(model))
    names: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        names.setdefault(id(tensor), []).append(name)
    unloaded = {id(b.sites.parameter) for state in states for b in state.parameters if b.index in b.chunk.unloaded}
    missing = [ns[0] for key, ns in names.items() if not any(n in given for n in ns) and (strict or key in unloaded)]
    found = []
    if missing:
        found.append(f"missing: {', '.join(missing)}")
    if strict and (unknown := [name for name in given if name not in expected]):
        found.append(f"unknown: {', '.join(unknown)}")
    misshapen = [
        f"{name} has {tuple(given[name].shape)}, expected {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in given and tuple(given[name].shape) != tuple(tensor.shape)
    ]
    if misshapen:
        found.append(f"other shapes: {'; '.join(misshapen)}")
    return f"the state dict does not fit the model; nothing was loaded. {'. '.join(found)}" if found else ""
