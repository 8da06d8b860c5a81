"""Gathers the state that is spread over ranks as a plain optimizer's state, and divides such a state among ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.agreement import agreeing, exchange_texts
from ..comm.communicator import Communicator
from ..comm.plain_values import decode_scalar, dtype_named, encode_scalar, name_of
from .buckets import Entry, Part, flat, laid_out_as, named
from .shards import Shards

__all__: list[str] = []

_CPU = torch.device("cpu")
_STEP = "step"  # the key of a count, also if it is a tensor that has the parameter's shape


class _Described(NamedTuple):
    """A part's state under one key, as JSON. A tensor with the part's elements (or of any shape, for a whole parameter) is sent by
    itself, and only described here. Other values are here themselves."""

    key: Any
    shape: list[int]
    dtype: str | None
    value: Any = None


def broadcast_values(communicator: Communicator, device: torch.device, values: dict[str, Any], source: int, what: str) -> dict[str, Any]:
    """Returns the small values of rank `source`; those of the other ranks do not matter. JSON is sent, so no rank can make another
    rank run code.

    Raises:
        TypeError: JSON can't hold a value. Every rank raises it.
    """
    own = communicator.rank == source
    with agreeing(communicator, device, what):
        text = json.dumps(encode_scalar(values, what)) if own else ""
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
    """Returns the state of every parameter, in the parameter's shape, on the CPU of rank `to`, and None on other ranks.

    One tensor at a time is sent. Beside its own state, another rank holds at most a part of one tensor.

    Raises:
        ValueError: A state has neither the shape of its parameter nor one element. Every rank raises it.
        TypeError: A state is neither a tensor nor a plain value. Every rank raises it.
    """
    communicator = shards.communicator
    with agreeing(communicator, shards.device, "the state of ZeroRedundancyOptimizer"):
        mine = [(number, _description(shards, entry)) for number, entry in enumerate(shards.entries) if shards.held[entry]]
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
    """Returns the part of a plain optimizer's state that this rank needs. `groups`: the parameters' numbers in `state`.

    Raises:
        ValueError: A tensor has neither its parameter's shape nor one element.
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
    """Copies one part's state, so that the whole state can be freed."""
    parameter, taken = part.entry.parameter, {}
    for key, value in state.items():
        if isinstance(value, Tensor) and not part.shaped and key != _STEP and value.shape == parameter.shape:
            taken[key] = part.of(laid_out_as(value.detach(), parameter)).to(parameter.device, copy=True)
        else:
            taken[key] = value.clone() if isinstance(value, Tensor) else value
    return taken


def _description(shards: Shards, entry: Entry) -> list[_Described]:
    """Describes the state of this rank's first part of a parameter."""
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
