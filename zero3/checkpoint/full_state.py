"""Converts the model to one state dict on rank 0, and back. It gathers one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..access import agree_to_gather, sharded_in, states_of, used
from ..comm.agreement import agreeing
from ..comm.communicator import is_first
from ..comm.plain_values import kind_of, unreadable
from ..core.layer_state import LayerState
from ..modules import own_name
from ..names import named_entries, named_tensors
from ..optim.state_memory import land_steps
from ..pinning import pin, pin_unloaded, write_back
from .contents import listed
from .extra_state import (
    copied,
    encoded,
    extra_states_of,
    sent_from_rank_0,
    set_extra_states,
    takers_of,
)
from .meta_buffers import initialise, put
from .progress import progress

__all__: list[str] = []

_LONG = 2**30  # bytes; a model of this size takes long enough for a progress bar


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = True, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """Returns the unwrapped model's state dict, on the CPU, with its own names, shapes and order.

    Every rank calls it. One layer at a time is gathered and copied. A tied parameter appears under
    each of its names. Names have no prefixes of activation checkpointing's and torch.compile's
    wrappers. The dict holds rank 0's extra state (`get_extra_state`) too.

    Args:
        model: Any model that contains zero3 layers.
        rank0_only: Only rank 0 keeps the tensors; the others get `{}`.
        dtype: A floating dtype of 16 bits or more; floating tensors are converted to it. None: as
            they are stored.

    Returns:
        Name to tensor.

    Raises:
        ValueError: Nothing in `model` is sharded, or `dtype` is not such a dtype. Every rank raises
            it.
        TypeError: `dtype` is no dtype; or `rank0_only=False`, and extra state could only be
            pickled. Every rank raises it.
        OSError: With `offload=DIR` a rank's disk has lost what a step has changed. Every rank
            raises it.

    Example::

        weights = zero3.full_state_dict(model, dtype=torch.bfloat16)
        if rank == 0:
            torch.save(weights, f"{directory}/weights.pt")
    """
    states = states_of(model)
    first = states[0]
    keeps = not rank0_only or is_first(first.communicator)
    extra: dict[str, Any] = {}
    error: Exception | None = None
    try:
        check_dtype(dtype)
        land_steps(states)
        extra = copied(extra_states_of(model)) if keeps else {}
    # of any kind, since modules raise it: the other ranks have to hear of it
    except Exception as caught:
        error = caught
    agree_to_gather(states, "full_state_dict", error)
    travels = not rank0_only and first.communicator.world_size > 1
    if travels and extra and not all(state.pinned for state in states):
        extra = sent_from_rank_0(first, extra)
    values = _gathered(states, dtype, keeps=keeps)
    if not keeps:
        return {}
    found: dict[str, Any] = {}
    for name, entry in named_entries(model):
        if isinstance(entry, Tensor):
            found[name] = values[id(entry)] if id(entry) in values else _copy(entry, dtype)
        else:
            found[name] = extra[name]
    return found


def _gathered(
    states: list[LayerState], dtype: torch.dtype | None, *, keeps: bool
) -> dict[int, Tensor]:
    """Copies of the layers' parameters, by id. A rank that `keeps` nothing takes part in the
    gathers.
    """
    values: dict[int, Tensor] = {}
    for state in _watched(states, "gathering layers"):
        pin(state)
        try:
            for sharded in state.parameters if keeps else ():
                values[id(sharded.sites.parameter)] = _copy(sharded.value, dtype)
        finally:
            state.unpin()
    return values


def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True
) -> None:
    """Fills a model from rank 0's state dict, which has the names of the unwrapped model. The
    inverse of `full_state_dict`.

    Every rank calls it. One layer at a time is gathered, changed and scattered. Names may have the
    prefixes of activation checkpointing's and torch.compile's wrappers. Modules take their extra
    state (`set_extra_state`) on every rank, at the end.

    Args:
        model: Any model that contains zero3 layers, with values or built on the meta device.
        state_dict: Name to tensor, or to a module's extra state. Only rank 0's counts; other ranks
            may pass `{}` or None.
        strict: Missing and unknown names are an error; otherwise they are left alone.

    Raises:
        ValueError: Names are missing or unknown, shapes or kinds of numbers differ, or tensors have
            no values. One error names all of these. Every rank raises it, before anything changes.
        TypeError: `state_dict` is no mapping, a value is no tensor, or extra state could only be
            pickled. Again every rank raises it.

    Example::

        weights = torch.load(f"{directory}/weights.pt", weights_only=True) if rank == 0 else None
        zero3.load_full_state_dict(model, weights)
    """
    states = used(model, "load_full_state_dict")
    first = states[0]
    given: dict[str, Any] = {}
    with agreeing(first, "load_full_state_dict") as lines:
        pinned = ", ".join(state.label for state in states if state.pinned)
        lines.append(f"inside full_params or resident: {pinned}")
        takers = takers_of(model)
        if is_first(first.communicator):
            given = _checked(model, states, state_dict, takers, strict)
    extra = {n: given[n] for n in takers if n in given}
    if takers:
        extra = sent_from_rank_0(first, extra)
    values = {id(tensor): given[name] for name, tensor in named_tensors(model) if name in given}
    inside = {id(tensor) for _, tensor in named_tensors(model)}
    for state in _watched(states, "loading layers"):
        _load_layer(state, values, inside)
    _load_others(model, states, values)
    set_extra_states(model, extra, first, "load_full_state_dict")


@torch.no_grad()
def _load_others(model: nn.Module, states: list[LayerState], values: Mapping[int, Tensor]) -> None:
    """Fills tensors that no layer owns: buffers, mostly. Buffers on meta that state dicts leave out
    are computed.
    """
    first = states[0]
    owned = sharded_in(states)
    others = {id(tensor): tensor for _, tensor in named_tensors(model) if id(tensor) not in owned}
    given = torch.tensor([key in values for key in others], dtype=torch.uint8, device=first.device)
    if others:
        first.communicator.broadcast(given)
    for (key, tensor), is_given in zip(others.items(), given.tolist(), strict=True):
        if is_given:
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=first.device)
            if is_first(first.communicator):
                value.copy_(values[key])
            first.communicator.broadcast(value)
            put(model, tensor, value)
    for _, value in initialise(model, states):
        first.communicator.broadcast(value)


@torch.no_grad()
def _load_layer(state: LayerState, values: Mapping[int, Tensor], inside: set[int]) -> None:
    """Parameters without values that are not `inside` go on without: they only share a chunk."""
    beside = (each for each in state.parameters if id(each.sites.parameter) not in inside)
    outside = [(e.chunk, e.index) for e in beside if e.index in e.chunk.unloaded]
    pin_unloaded(state)
    try:
        for sharded in state.parameters:
            if id(sharded.sites.parameter) in values:
                sharded.value.copy_(values[id(sharded.sites.parameter)])
        write_back([state])
    finally:
        state.unpin()
        for chunk, index in outside:
            chunk.unloaded.add(index)


def _watched(states: list[LayerState], doing: str) -> Iterator[LayerState]:
    """Yields the layers. Rank 0 shows its progress with a large model."""
    sizes = [state.chunks.full_nbytes() for state in states]
    shown = is_first(states[0].communicator) and sum(sizes) >= _LONG
    with progress(sum(sizes), f"zero3: {doing}", shown=shown) as advance:
        for state, nbytes in zip(states, sizes, strict=True):
            yield state
            advance(nbytes)


def check_dtype(dtype: Any) -> None:
    """Raises the error if `dtype` can't be saved in. Integers would truncate every weight, and 8
    bits need scales.
    """
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"dtype must be a torch.dtype or None, found {dtype!r}")
    if dtype is not None and not (dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(
            "floating tensors are converted to dtype, so it must be a floating dtype of 16 bits "
            f"or more, found {dtype}"
        )


def converted(own: torch.dtype, to: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is saved: floating ones are converted."""
    return to if to is not None and own.is_floating_point else own


def _copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    kind = converted(tensor.dtype, dtype)
    return torch.empty(tensor.shape, dtype=kind).copy_(tensor.detach())


def _checked(
    model: nn.Module,
    states: list[LayerState],
    state_dict: Any,
    takers: Mapping[str, nn.Module],
    strict: bool,
) -> dict[str, Any]:
    """Returns rank 0's dict under the model's own names. Raises ValueError or TypeError if the dict
    does not fit the model. One error names all problems.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            "state_dict must map names to tensors on rank 0, found a "
            f"{type(state_dict).__name__}; nothing was loaded"
        )
    if strangers := [key for key in state_dict if not isinstance(key, str)]:
        raise TypeError(
            f"state_dict must have names as keys, found {strangers[0]!r:.80}; nothing was loaded"
        )
    given: dict[str, Any] = {}
    for key, value in state_dict.items():
        if given.setdefault(own_name(key), value) is not value:
            raise ValueError(
                f"state_dict has {own_name(key)!r} twice, with and without the prefix of a "
                "wrapper; nothing was loaded"
            )
    expected = dict(named_tensors(model))
    problems = _misnamed(expected, states, given, takers, strict)
    known = [(name, given[name], tensor) for name, tensor in expected.items() if name in given]
    unread = {
        name: problem for name, value, _ in known if (problem := unreadable(value)) is not None
    }
    if unread:
        problems.append(f"can't be read: {'; '.join(f'{n} {why}' for n, why in unread.items())}")
    for what, of in (
        ("shape", lambda tensor: tuple(tensor.shape)),
        ("kind", lambda tensor: kind_of(tensor.dtype)),
    ):
        other = [
            f"{n} has {of(v)}, expected {of(t)}"
            for n, v, t in known
            if n not in unread and of(v) != of(t)
        ]
        problems += [f"other {what}s: {'; '.join(other)}"] if other else []
    if problems:
        kind = ValueError if all(isinstance(given[n], Tensor) for n in unread) else TypeError
        raise kind(
            f"the state dict does not fit the model; nothing was loaded. {'. '.join(problems)}"
        )
    # raises for values that can't be sent
    encoded({name: given[name] for name in takers if name in given}, [])
    return given


def _misnamed(
    expected: Mapping[str, Tensor],
    states: list[LayerState],
    given: Mapping[str, Any],
    takers: Mapping[str, nn.Module],
    strict: bool,
) -> list[str]:
    """Returns in words which names are missing and which are unknown. A tied parameter may have any
    of its names.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        names.setdefault(id(tensor), []).append(name)
    owned = sharded_in(states).items()
    unloaded = {key for key, each in owned if each.index in each.chunk.unloaded}
    missing = [
        ns[0]
        for key, ns in names.items()
        if not any(n in given for n in ns) and (strict or key in unloaded)
    ]
    missing += [name for name in takers if name not in given and strict]
    unknown = [name for name in given if name not in expected and name not in takers and strict]
    return listed({"missing": missing, "unknown": unknown})
