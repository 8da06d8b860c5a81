"""The state of an optimizer that is spread over ranks: brought together as a plain optimizer's, and taken apart again."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..collectives import Communicator
from .buckets import Entry, Part, flat, laid_out_as
from .shards import Shards

__all__: list[str] = []

_STEP = "step"  # a count wherever it is a tensor, whatever its shape


class _Elements(NamedTuple):
    """Of a state tensor: one element for each of the part's, or, of a whole parameter, any shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class _Odd(NamedTuple):
    """What can't be brought together."""

    text: str


def gather_objects(communicator: Communicator, device: torch.device, value: object) -> list[Any]:
    """Every rank's (small) `value`, in rank order."""
    payload = pickle.dumps(value)
    sizes = [int.from_bytes(size, "little") for size in communicator.exchange(len(payload).to_bytes(8, "little"), device)]
    padded = communicator.exchange(payload.ljust(max(sizes), b"\0"), device)
    return [pickle.loads(raw) for raw in padded]


def broadcast_object(communicator: Communicator, device: torch.device, value: object, source: int) -> Any:
    """Rank `source`'s `value`; what the others pass does not matter."""
    payload = pickle.dumps(value)
    size = torch.tensor([len(payload)], device=device)
    communicator.broadcast(size, source)
    own = communicator.rank == source
    content = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device) if own else size.new_empty(int(size), dtype=torch.uint8)
    communicator.broadcast(content, source)
    return value if own else pickle.loads(bytes(content.tolist()))


def consolidate(shards: Shards, groups: int, to: int) -> dict[Tensor, dict[str, Any]] | None:
    """The state of every parameter in the parameter's shape, on the CPU of rank `to`; None on the others.

    One tensor at a time: a rank but `to` holds no more than another's part of it beside its own state.

    Raises:
        ValueError: a state that no parameter's elements or count explain; on every rank.
    """
    communicator = shards.communicator
    full: dict[Tensor, dict[str, Any]] = {}
    parts = shards.everyones_parts()
    for group in range(groups):
        entries = [entry for entry in shards.entries if entry.group == group]
        mine = {number: _description(shards, entry) for number, entry in enumerate(entries) if shards.held[entry]}
        everyone = gather_objects(communicator, shards.device, mine)
        for number, entry in enumerate(entries):
            for key, what in next((each[number] for each in everyone if each.get(number)), {}).items():
                if isinstance(what, _Odd):
                    raise ValueError(what.text)
                value = _brought_together(shards, entry, parts[entry], key, what, to) if isinstance(what, _Elements) else what
                if communicator.rank == to:
                    full.setdefault(entry.parameter, {})[key] = value
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


def _description(shards: Shards, entry: Entry) -> dict[str, Any]:
    """Of this rank's first part: keys, and what is behind each. Counts and other values go along as they are."""
    part, parameter = shards.held[entry][0]
    described: dict[str, Any] = {}
    for key, value in shards.optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor):
            described[key] = value
        elif value.numel() == 1 and (key == _STEP or value.ndim == 0):
            described[key] = value.detach().cpu()
        elif part.shaped or value.shape == parameter.shape:
            described[key] = _Elements(value.dtype, tuple(value.shape))
        else:
            described[key] = _Odd(
                f"the optimizer keeps {key!r} of shape {tuple(value.shape)} for {parameter.numel()} elements of {entry.name}: "
                "it has no place in a whole parameter's state. Use whole=True for this group."
            )
    return described


def _brought_together(
    shards: Shards, entry: Entry, parts: list[tuple[int, int, Part]], key: str, what: _Elements, to: int
) -> Tensor | None:
    own, full = shards.communicator.rank == to, None
    if own:
        shaped = torch.Size(what.shape) if entry.owner is not None else entry.parameter.shape
        like = entry.parameter if shaped == entry.parameter.shape else torch.empty(shaped, device="meta")
        full = torch.empty_like(like, dtype=what.dtype, device="cpu")
    for rank, number, part in parts:
        values: Tensor | None = None
        if rank == shards.communicator.rank:
            values = shards.optimizer.state[shards.held[entry][number][1]][key].detach().to(entry.parameter.device)
        if rank != to:
            if values is None:
                shape = what.shape if part.shaped else (part.stop - part.start,)
                values = torch.empty(shape, dtype=what.dtype, device=entry.parameter.device)
            values = values.contiguous()
            shards.communicators[entry.parameter.device].broadcast(values, source=rank)
        if full is not None and values is not None:
            target = full if part.shaped else flat(full)[part.start : part.stop]
            target.copy_(values.view(target.shape) if part.shaped else values)
    return full
