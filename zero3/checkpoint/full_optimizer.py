"""Converts the optimizer's state to the state dict of an optimizer over the unsharded model, by parameter names, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..access import states_of
from ..comm.agreement import agreeing, exchange_texts
from ..comm.plain_values import decode_scalar, dtype_named
from ..optim.check_optimizer import warn_if_inexact
from ..optim.several import Optimizers, Together
from ..optim.state_memory import land_steps
from .contents import Contents, Span
from .full_optimizer_reading import read_full
from .optimizer_contents import Held, NamedState, OptimizerContents, contents_of, held_by
from .optimizer_placing import Placing, Target, place

__all__: list[str] = []

_CPU = torch.device("cpu")


def full_optimizer_state_dict(model: nn.Module, optimizer: Optimizers, *, rank0_only: bool = True) -> dict[str, Any]:
    """Returns the optimizer's state as one dict, with the shapes and the structure of an optimizer over the unsharded model.

    Names replace parameters, in `params` too, as in `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` with
    `full_state_dict=True`. So a run can go on in plain torch, DDP or FSDP2. Every rank calls it. It gathers one tensor at a time.
    Tensors are on the CPU. A tied parameter has its first name.

    Args:
        model: Any model that contains zero3 layers.
        optimizer: Over the model's chunks, or parts of them. Pass several that share the model as a list or a dict; their groups
            follow one another.
        rank0_only: Only rank 0 keeps the state; the others get `{}`.

    Returns:
        A dict of "state", with a dict of tensors and numbers for each name, and of "param_groups", whose "params" are names.

    Raises:
        ValueError: Nothing in `model` is sharded, or the optimizer is of another model.
        TypeError: The shape of a state fits no parameter.
        OSError: With `offload=DIR` a rank's disk has lost what a step has changed. Every rank raises it.

    Example::

        state = zero3.full_optimizer_state_dict(model, optimizer)
    """
    contents, together, held = _looked_at(model, optimizer, "full_optimizer_state_dict", reads=True)
    own = contents_of(together, held, contents)
    keeps = not rank0_only or contents.is_first
    parts: dict[str, list[tuple[Tensor, Span]]] = {}
    for one in held:
        for span in one.spans if one.mine and contents.writes else ():
            parts.setdefault(span.name, []).append((one.parameter, span))
    state = {}
    for name, named in own.state.items():
        gathered = _gather(contents, together, parts.get(name, []), name, named)
        if keeps:
            scalars = {key: decode_scalar(value, _CPU) for key, value in named.scalars.items()}
            state[name] = scalars | {key: value.cpu() for key, value in gathered.items()}
    if not keeps:
        return {}
    groups = [{**{key: decode_scalar(value, _CPU) for key, value in options.items()}, "params": names} for options, names in own.groups]
    return {"state": state, "param_groups": groups}


def _gather(contents: Contents, optimizer: Together, parts: list[tuple[Tensor, Span]], name: str, named: NamedState) -> dict[str, Tensor]:
    """Puts the tensors of one name together from every rank's slices."""
    found = {}
    for key, dtype in named.elements.items():
        full = torch.zeros(torch.Size(contents.shape(name)).numel(), dtype=dtype_named(dtype), device=contents.device)
        for parameter, span in parts:
            flat = optimizer.state[parameter][key].detach().reshape(-1)
            full[span.start : span.stop] = flat[span.offset : span.offset + span.stop - span.start]
        found[key] = _add_up(contents, full).view(contents.shape(name))
    for key, (dtype, shape) in named.whole.items():
        full = torch.zeros(shape, dtype=dtype_named(dtype), device=contents.device)
        for parameter, _ in parts:
            full.copy_(optimizer.state[parameter][key])
        found[key] = _add_up(contents, full.view(-1)).view(shape)
    return found


def _add_up(contents: Contents, full: Tensor) -> Tensor:
    """Adds over ranks. Each element is zero on all ranks except one. Bytes are added, so that no value is rounded or loses its sign."""
    if full.numel():
        contents.communicator.all_reduce(full.view(torch.uint8))
    return full


def load_full_optimizer_state_dict(model: nn.Module, optimizer: Optimizers, state_dict: Mapping[str, Any] | None) -> None:
    """Fills an optimizer from rank 0's dict, by parameter names. The inverse of `full_optimizer_state_dict`.

    Every rank calls it. It sends one tensor at a time. Each group takes the options that its parameters had.

    Args:
        model: Any model that contains zero3 layers.
        optimizer: Over the model's chunks, or parts of them. Its state is replaced. Pass several as a list or a dict: each takes
            the state of its parameters.
        state_dict: A dict as `full_optimizer_state_dict` returns it. Only rank 0's counts; other ranks may pass `{}` or None.

    Raises:
        ValueError: Names are unknown or missing, shapes are wrong, tensors have no values, options or steps differ within one
            parameter of this optimizer, or an optimizer of this class and with these options does not keep such state. One error
            names all of these. Every rank raises it, before anything changes.
        TypeError: `state_dict` is no such dict, or an option or a state is neither a number nor a tensor. Again every rank raises it.

    Example::

        state = zero3.full_optimizer_state_dict(model, optimizer)
        zero3.load_full_optimizer_state_dict(model, optimizer, state)
    """
    contents, together, held = _looked_at(model, optimizer, "load_full_optimizer_state_dict", reads=False)
    text = ""
    given: dict[str, Mapping[str, Any]] = {}
    with agreeing(contents.communicator, contents.device, "load_full_optimizer_state_dict"):
        if contents.is_first:
            described, given = read_full(state_dict, contents)
            text = json.dumps(described.to_json())
    own = contents_of(together, held, contents, with_state=False)
    source = OptimizerContents.from_json(json.loads(exchange_texts(contents.communicator, contents.device, text)[0]))
    with agreeing(contents.communicator, contents.device, "load_full_optimizer_state_dict"):
        placing = place(together, held, own, source, contents)
    _deal_out(contents, placing, source, given)
    placing.commit()


def _looked_at(model: nn.Module, optimizer: Optimizers, caller: str, *, reads: bool) -> tuple[Contents, Together, list[Held]]:
    """The model's contents, the optimizers as one, and their parameters, whose state the caller may read. Warns if one is not exact."""
    first = states_of(model)[0]
    with agreeing(first.communicator, first.device, caller):
        contents, together = Contents(model, caller), Together(optimizer)
        land_steps(contents.states if reads else ())
        held = held_by(together, contents)
        for member in together.members:
            warn_if_inexact(contents.states, member)
    return contents, together, held


def _deal_out(contents: Contents, placing: Placing, source: OptimizerContents, given: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Broadcasts rank 0's tensors one after another. Each rank keeps its slices."""
    wanted: dict[tuple[str, str], list[Target]] = {}
    for target in placing.targets:
        wanted.setdefault((target.span.name, target.key), []).append(target)
    whole = {(name, key): tensor for name, key, tensor in placing.whole}
    for name, named in source.state.items():
        sizes = {key: (dtype, contents.shape(name)) for key, dtype in named.elements.items()}
        for key, (dtype, shape) in [*sizes.items(), *((key, (dtype, tuple(shape))) for key, (dtype, shape) in named.whole.items())]:
            value = torch.empty(shape, dtype=dtype_named(dtype), device=contents.device)
            if contents.is_first:
                value.copy_(given[name][key])
            if value.numel():
                contents.communicator.broadcast(value)
            for target in wanted.get((name, key), []):
                target.place.copy_(value.view(-1)[target.span.start : target.span.stop])
            if (name, key) in whole:
                whole[name, key].copy_(value)
