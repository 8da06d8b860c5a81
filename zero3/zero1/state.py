"""Gathers the state that is spread over ranks as a plain optimizer's state, and divides such a
state among ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..comm.agreement import agreeing, exchange_texts
from ..comm.plain_values import decode_scalar, dtype_named, encode_scalar, name_of
from .division import Share, Spread, flat, laid_out_as
from .groups import said_of
from .shards import Shards

__all__: list[str] = []

_CPU = torch.device("cpu")
_STEP = "step"  # the key of a count, also if it is a tensor that has the parameter's shape


class _Described(NamedTuple):
    """A share's state under one key, as JSON.

    A tensor with the share's elements (or of any shape, for a whole parameter) is sent by itself,
    and only described here. Other values are here themselves.
    """

    key: Any
    shape: list[int]
    dtype: str | None
    value: Any = None


def consolidate(shards: Shards, to: int) -> dict[Tensor, dict[str, Any]] | None:
    """Returns the state of every parameter, in the parameter's shape, on the CPU of rank `to`, and
    None on other ranks.

    One tensor at a time is sent. Beside its own state, another rank holds at most a share of one
    tensor.

    Raises:
        ValueError: A state has neither the shape of its parameter nor one element. Every rank
            raises it.
        TypeError: A state is neither a tensor nor a plain value. Every rank raises it.
    """
    ranks = shards.ranks
    with agreeing(ranks, "the state of ZeroRedundancyOptimizer"):
        held = [(number, spread) for number, spread in enumerate(shards.spreads) if spread.own]
        mine = [(number, _description(shards, spread)) for number, spread in held]
    with ranks.naming("describing", "the state of ZeroRedundancyOptimizer"):
        everyone = [dict(json.loads(text)) for text in exchange_texts(ranks, json.dumps(mine))]
    full: dict[Tensor, dict[str, Any]] = {}
    for number, spread in enumerate(shards.spreads):
        described = next((told[number] for told in everyone if told.get(number)), ())
        for what in (_Described(*each) for each in described):
            key = decode_scalar(what.key, _CPU)
            if what.dtype is None:
                value = decode_scalar(what.value, _CPU)
                value = value.view(what.shape) if isinstance(value, Tensor) else value
            else:
                value = _brought_together(shards, spread, key, what, to)
            if ranks.index == to:
                full.setdefault(spread.parameter, {})[key] = value
    return full if ranks.index == to else None


def own_state(
    shards: Shards, groups: list[list[int]], state: Mapping[int, Mapping[str, Any]]
) -> dict[nn.Parameter, dict[str, Any]]:
    """Returns what of a plain optimizer's state this rank's local optimizer needs. `groups`: the
    parameters' numbers in `state`.

    Raises:
        ValueError: A tensor has neither its parameter's shape nor one element.
    """
    numbers = [number for group in groups for number in group]
    taken: dict[nn.Parameter, dict[str, Any]] = {}
    # torch compares the groups' sizes
    for number, spread in zip(numbers, shards.spreads, strict=False):
        if number in state:
            for key, value in state[number].items():
                _check_shape(spread, key, value)
            for share, parameter in spread.own.items():
                taken[parameter] = {
                    key: _share_of(value, key, spread, share)
                    for key, value in state[number].items()
                }
    return taken


def lines_of(state: Mapping[Any, Any]) -> list[str]:
    """Describes a plain optimizer's state, which must be the same on all ranks, but for the values
    of tensors of several elements.
    """
    return [
        f"the state of {number!r}: {said_of(held) if isinstance(held, Mapping) else held!r}"
        for number, held in sorted(state.items(), key=lambda item: str(item[0]))
    ]


def _check_shape(spread: Spread, key: str, value: Any) -> None:
    if (
        isinstance(value, Tensor)
        and not spread.whole
        and value.numel() != 1
        and value.shape != spread.parameter.shape
    ):
        found, expected = tuple(value.shape), tuple(spread.parameter.shape)
        raise ValueError(
            f"the state {key!r} of {spread.name} has shape {found}, expected {expected} or one "
            "element"
        )


def _share_of(value: Any, key: str, spread: Spread, share: Share) -> Any:
    """Copies one share's state, so that the whole state can be freed."""
    if not isinstance(value, Tensor):
        return value
    if spread.shaped or key == _STEP or value.shape != spread.parameter.shape:
        return value.clone()
    return spread.cut(share, laid_out_as(value.detach(), spread.parameter)).to(
        spread.parameter.device, copy=True
    )


def _description(shards: Shards, spread: Spread) -> list[_Described]:
    """Describes the state of this rank's first share of a parameter."""
    parameter = next(iter(spread.own.values()))
    described = []
    for key, value in shards.optimizer.state.get(parameter, {}).items():
        what = f"{type(shards.optimizer).__name__}'s {key!r} of {spread.name}"
        named = encode_scalar(key, f"the key of {what}")
        shape = list(value.shape) if isinstance(value, Tensor) else []
        if not isinstance(value, Tensor):
            described.append(_Described(named, shape, None, encode_scalar(value, what)))
        elif value.numel() == 1 and (key == _STEP or (value.ndim == 0 and parameter.ndim)):
            described.append(
                _Described(named, shape, None, encode_scalar(value.detach().cpu().view(()), what))
            )
        elif spread.shaped or value.shape == parameter.shape:
            described.append(_Described(named, shape, name_of(value.dtype)))
        else:
            raise ValueError(
                f"{what} has shape {tuple(shape)} for {parameter.numel()} of its elements: it has "
                "no place in a whole parameter's state. Use whole=True for this group."
            )
    return described


def _brought_together(
    shards: Shards, spread: Spread, key: Any, what: _Described, to: int
) -> Tensor | None:
    ranks, parameter, full = shards.ranks, spread.parameter, None
    dtype = dtype_named(str(what.dtype))
    if ranks.index == to:
        shape = torch.Size(what.shape) if spread.whole else parameter.shape
        like = parameter if shape == parameter.shape else torch.empty(shape, device="meta")
        full = torch.empty_like(like, dtype=dtype, device="cpu")
    for share in spread.shares:
        values: Tensor | None = None
        if (local := spread.own.get(share)) is not None:
            values = shards.optimizer.state[local][key].detach().to(parameter.device)
        if share.index != to:
            if values is None:
                shape = torch.Size(what.shape if spread.shaped else (share.stop - share.start,))
                values = torch.empty(shape, dtype=dtype, device=parameter.device)
            values = values.contiguous()
            subject = f"the state {key!r} of {spread.name} of ZeroRedundancyOptimizer"
            ranks.broadcast(values, share.index, "bringing together", subject)
        if full is not None and values is not None:
            target = full if spread.shaped else flat(full)[share.start : share.stop]
            target.copy_(values.view(target.shape) if spread.shaped else values)
    return full
