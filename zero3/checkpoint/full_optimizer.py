"""Converts the optimizer's state to that of an optimizer over the unsharded model, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..access import used_together
from ..comm.agreement import agreeing, exchange_texts
from ..comm.plain_values import decode_scalars, dtype_named
from ..optim.check_optimizer import warn_if_inexact
from ..optim.low_bit import fresh_state, joined
from ..optim.several import Optimizers, Together
from ..optim.state_memory import land_steps
from .contents import Contents, NamedSpan
from .placing import Placing, Target, place
from .saved_optimizer import (
    Held,
    Holding,
    NamedState,
    OptimizerContents,
    StateByName,
    contents_of,
    read_full,
)

__all__: list[str] = []


def full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizers,
    *,
    rank0_only: bool = True,
) -> dict[str, Any]:
    """Returns the optimizer's state as one dict, as an optimizer over the unsharded model has it.

    Names replace parameters, in `params` too, as in
    `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` with `full_state_dict=True`.
    So a run can go on in plain torch, DDP or FSDP2. Every rank calls it. It gathers one tensor at a
    time. Tensors are on the CPU. A tied parameter has its first name.

    Args:
        model: Any model that contains zero3 layers.
        optimizer: Over the model's chunks, or parts of them. Pass several that share the model as a
            list or a dict; their groups follow one another.
        rank0_only: Only rank 0 keeps the state; the others get `{}`.

    Returns:
        A dict of "state", with a dict of tensors and numbers for each name, and of "param_groups",
        whose "params" are names.

    Raises:
        ValueError: Nothing in `model` is sharded, or the optimizer is of another model.
        TypeError: The shape of a state fits no parameter.
        OSError: With `offload=DIR` a rank's disk has lost what a step has changed. Every rank
            raises it.

    Example::

        state = zero3.full_optimizer_state_dict(model, optimizer)
    """
    caller = "full_optimizer_state_dict"
    holding = _looked_at(model, optimizer, caller, reads=True)
    contents, together = holding.contents, holding.optimizer
    own = contents_of(holding)
    keeps = not rank0_only or contents.is_first
    parts: dict[str, list[tuple[Held, NamedSpan]]] = {}
    for one in holding.held:
        for span in one.spans if one.mine and contents.writes else ():
            parts.setdefault(span.name, []).append((one, span))
    state = {}
    for name, named in own.state.items():
        gathered = _gather(contents, together, parts.get(name, []), name, named)
        if keeps:
            tensors = {key: value.cpu() for key, value in gathered.items()}
            state[name] = tensors | decode_scalars(named.scalars, "cpu")
    if aligned := _aligned(together, own):
        with agreeing(contents, caller):
            for name in aligned.keys() & state.keys():
                group = aligned[name]
                like = torch.empty(contents.shape(name), dtype=contents.dtype(name))
                made = partial(
                    fresh_state, together.owners[group], together.param_groups[group], like
                )
                state[name] = joined(state[name], made)
    if not keeps:
        return {}
    groups = [{**decode_scalars(options, "cpu"), "params": names} for options, names in own.groups]
    return {"state": state, "param_groups": groups}


def _aligned(optimizer: Together, own: OptimizerContents) -> dict[str, int]:
    """The group of each parameter whose state may be quantised in blocks."""
    numbered = enumerate(own.groups)
    return {
        n: group for group, (_, names) in numbered if optimizer.is_aligned(group) for n in names
    }


def _gather(
    contents: Contents,
    optimizer: Together,
    parts: list[tuple[Held, NamedSpan]],
    name: str,
    named: NamedState,
) -> dict[str, Tensor]:
    """Puts the tensors of one name together from every rank's slices.

    They are added up over ranks: each element is zero on all ranks except one. Bytes are added, so
    that no value is rounded or loses its sign.
    """
    found = {}
    for key, (dtype, shape) in named.tensors(contents.shape(name)).items():
        found[key] = torch.zeros(shape, dtype=dtype_named(dtype), device=contents.device)
        flat = found[key].view(-1)
        for held, span in parts:
            value = optimizer.tensors(held.group, held.parameter)[key].detach()
            own = held.cut(span, key, value, optimizer.blocks(held.group))
            if own is not None:
                flat[own.start : own.stop] = own.of(value.reshape(-1))
            elif not span.start:
                flat.copy_(value.reshape(-1))
        if flat.numel():
            contents.communicator.all_reduce(flat.view(torch.uint8))
    return found


def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizers,
    state_dict: Mapping[str, Any] | None,
) -> None:
    """Fills an optimizer from rank 0's dict, by names. The inverse of `full_optimizer_state_dict`.

    Every rank calls it. It sends one tensor at a time. Each group takes the options that its
    parameters had.

    Args:
        model: Any model that contains zero3 layers.
        optimizer: Over the model's chunks, or parts of them. Its state is replaced. Pass several as
            a list or a dict: each takes the state of its parameters.
        state_dict: A dict as `full_optimizer_state_dict` returns it. Only rank 0's counts; other
            ranks may pass `{}` or None.

    Raises:
        ValueError: Names are unknown or missing, shapes are wrong, tensors have no values, options
            or steps differ within one parameter of this optimizer, or an optimizer of this class
            and with these options does not keep such state. One error names all of these. Every
            rank raises it, before anything changes.
        TypeError: `state_dict` is no such dict, or an option or a state is neither a number nor a
            tensor. Again every rank raises it.

    Example::

        state = zero3.full_optimizer_state_dict(model, optimizer)
        zero3.load_full_optimizer_state_dict(model, optimizer, state)
    """
    caller = "load_full_optimizer_state_dict"
    holding = _looked_at(model, optimizer, caller, reads=False)
    contents = holding.contents
    text = ""
    given: StateByName = {}
    own = contents_of(holding, with_state=False)
    with agreeing(contents, caller):
        if contents.is_first:
            described, given = read_full(state_dict, contents, _aligned(holding.optimizer, own))
            text = json.dumps(described.to_json())
    text = exchange_texts(contents, text)[0]
    source = OptimizerContents.from_json(json.loads(text))
    with agreeing(contents, caller):
        placing = place(holding, own, source)
    _deal_out(contents, placing, source, given)
    placing.commit()


def _looked_at(
    model: nn.Module,
    optimizer: Optimizers,
    caller: str,
    *,
    reads: bool,
) -> Holding:
    """What the optimizers hold of the model. Warns if one is not exact. `reads`: their state."""
    first = used_together(model, caller)[0]
    with agreeing(first, caller) as lines:
        lines.append(f"the model of {first.name_among_ranks}")
        contents = Contents(model, caller)
        land_steps(contents.states if reads else ())
        holding = Holding(optimizer, contents)
        for member in holding.optimizer.members:
            warn_if_inexact(contents.states, member)
    return holding


def _deal_out(
    contents: Contents,
    placing: Placing,
    source: OptimizerContents,
    given: StateByName,
) -> None:
    """Broadcasts rank 0's tensors one after another. Each rank keeps its slices."""
    wanted: dict[tuple[str, str], list[Target]] = {}
    for target in placing.targets:
        wanted.setdefault((target.name, target.key), []).append(target)
    for name, named in source.state.items():
        for key, (dtype, shape) in named.tensors(contents.shape(name)).items():
            value = torch.empty(shape, dtype=dtype_named(dtype), device=contents.device)
            if contents.is_first:
                value.copy_(given[name][key])
            if value.numel():
                contents.communicator.broadcast(value)
            for _, _, start, values in wanted.get((name, key), []):
                own = value.view(-1)[start : start + len(values)] if start is not None else value
                values.copy_(own)
