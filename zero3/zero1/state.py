"""The state of an optimizer that is spread over ranks: brought together as a plain optimizer's, and taken apart again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.agreement import agree, exchange_texts
from ..comm.communicator import Communicator
from ..comm.plain_values import decode_scalar, dtype_named, encode_scalar, name_of
from .buckets import Entry, Part, flat, laid_out_as, named
from .shards import Shards

__all__: list[str] = []

_CPU = torch.device("cpu")
_STEP = "step"  # a count wherever it is a tensor, whatever its shape


class _Described(NamedTuple):
    """What a part has under one key, as JSON has it: a tensor with an element for each of the part's (of a whole parameter,
    of any shape), which travels as a tensor, or else the value itself."""

    key: Any
    shape: list[int]
    dtype: str | None
    value: Any = None


def broadcast_values(communicator: Communicator, device: torch.device, values: dict[str, Any], source: int, what: str) -> dict[str, Any]:
    """Rank `source`'s (small) values, as JSON; what the others pass does not matter. No rank can make another run code.

    Raises:
        TypeError: something among them that JSON can't hold; on every rank.
    """
    text, error, own = "", None, communicator.rank == source
    try:
        text = json.dumps(encode_scalar(values, what)) if own else ""
    except TypeError as caught:
        error = caught
    agree(communicator, device, what, [], error)
    payload = text.encode()
    size = torch.tensor([len(payload)], device=device)
    with named(communicator, "broadcasting", f"what rank {source} has to tell of {what}"):
        communicator.broadcast(size, source)
        content = (
            torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device) if own else size.new_empty(int(size), dtype=torch.uint8)
        )
        communicator.broadcast(content, source)
    return values if own else dict(decode_scalar(json.loads(bytes(content.tolist())), device))


def consolidate(shards: Shards, to: int) -> dict[Tensor, dict[str, Any]] | None:
    """The state of every parameter in the parameter's shape, on the CPU of rank `to`; None on the others.

    One tensor at a time: a rank but `to` holds no more than another's part of it beside its own state.

    Raises:
        ValueError: a state that no parameter's elements or count explain; on every rank.
        TypeError: a state that is neither a tensor nor a plain value; on every rank.
    """
    communicator, error = shards.communicator, None
    mine: list[tuple[int, list[_Described]]] = []
    try:
        mine = [(number, _description(shards, entry)) for number, entry in enumerate(shards.entries) if shards.held[entry]]
    except (ValueError, TypeError) as caught:
        error = caught
    agree(communicator, shards.device, "the state of ZeroRedundancyOptimizer", [], error)
    with named(communicator, "describing", "the state of ZeroRedundancyOptimizer"):
        everyone = [dict(json.loads(text)) for text in exchange_texts(communicator, shards.device, json.dumps(mine))]
    full: dict[Tensor, dict[str, Any]] = {}
    parts = shards.everyones_parts()
    for number, entry in enumerate(shards.entries):
        for what in (_Described(*each) for each in next((held[number] for held in everyone if held.get(number)), ())):
            value = _value(what) if what.dtype is None else _brought_together(shards, entry, parts[entry], what, to)
            if communicator.rank == to:
                full.setdefault(entry.parameter, {})[decode_scalar(what.key, _CPU)] = value
    return full if communicator.rank == to else None


def local_state(shards: Shards, groups: list[list[int]], state: Mapping[int, Mapping[str, Any]]) -> dict[Entry, list[dict[str, Any]]]:
    """Of a plain optimizer's state, what this rank's parts need. `groups`: the numbers that `state` has for the parameters.

    Raises:
        ValueError: a tensor that has neither its parameter's shape nor one element; on every rank that looks at it.
    """
    numbers = [number for group in groups for number in group]
    taken = {}
    for number, entry in zip(numbers, shards.entries, strict=False):  # torch compares the groups' sizes
        if number in state:
            _check_shapes(entry, state[number])
            taken[entry] = [_part_of_state(part, state[number]) for part, _ in shards.held[entry]]
    return taken


def _check_shapes(entry: Entry, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor) and entry.owner is None and value.numel() != 1 and value.shape != entry.parameter.shape:
            found, expected = tuple(value.shape), tuple(entry.parameter.shape)
            raise ValueError(f"the state {key!r} of {entry.name} has shape {found}, expected {expected} or one element")


def _part_of_state(part: Part, state: Mapping[str, Any]) -> dict[str, Any]:
    """Copies, so that the whole can be freed."""
    parameter, taken = part.entry.parameter, {}
    for key, value in state.items():
        if isinstance(value, Tensor) and not part.shaped and key != _STEP and value.shape == parameter.shape:
            taken[key] = part.of(laid_out_as(value.detach(), parameter)).to(parameter.device, copy=True)
        else:
            taken[key] = value.clone() if isinstance(value, Tensor) else value
    return taken


def _description(shards: Shards, entry: Entry) -> list[_Described]:
    """Of this rank's first part. Counts and other values go along as they are."""
    part, parameter = shards.held[entry][0]
    described = []
    for key, value in shards.optimizer.state.get(parameter, {}).items():
        what = f"{type(shards.optimizer).__name__}'s {key!r} of {entry.name}"
        named, shape = encode_scalar(key, f"the key of {what}"), list(value.shape) if isinstance(value, Tensor) else []
        if not isinstance(value, Tensor):
            described.append(_Described(named, shape, None, encode_scalar(value, what)))
        elif value.numel() == 1 and (key == _STEP or (value.ndim == 0 and parameter.ndim)):
            described.append(_Described(named, shape, None, encode_scalar(value.detach().cpu().view(()), what)))
        elif part.shaped or value.shape == parameter.shape:
            described.append(_Described(named, shape, name_of(value.dtype)))
        else:
            raise ValueError(
                f"{what} has shape {tuple(shape)} for {parameter.numel()} of its elements: it has no place in a whole parameter's "
                "state. Use whole=True for this group."
            )
    return described


def _value(what: _Described) -> Any:
    value = decode_scalar(what.value, _CPU)
    return value.view(what.shape) if isinstance(value, Tensor) else value


def _brought_together(shards: Shards, entry: Entry, parts: list[tuple[int, int, Part]], what: _Described, to: int) -> Tensor | None:
    own, full = shards.communicator.rank == to, None
    key, dtype = decode_scalar(what.key, _CPU), dtype_named(str(what.dtype))
    if own:
        shaped = torch.Size(what.shape) if entry.owner is not None else entry.parameter.shape
        like = entry.parameter if shaped == entry.parameter.shape else torch.empty(shaped, device="meta")
        full = torch.empty_like(like, dtype=dtype, device="cpu")
    for rank, number, part in parts:
        values: Tensor | None = None
        if rank == shards.communicator.rank:
            values = shards.optimizer.state[shards.held[entry][number][1]][key].detach().to(entry.parameter.device)
        if rank != to:
            if values is None:
                shape = what.shape if part.shaped else (part.stop - part.start,)
                values = torch.empty(shape, dtype=dtype, device=entry.parameter.device)
            values = values.contiguous()
            communicator = shards.communicators[entry.parameter.device]
            with named(communicator, "bringing together", f"the state {key!r} of {entry.name} of ZeroRedundancyOptimizer"):
                communicator.broadcast(values, source=rank)
        if full is not None and values is not None:
            target = full if part.shaped else flat(full)[part.start : part.stop]
            target.copy_(values.view(target.shape) if part.shaped else values)
    return full
