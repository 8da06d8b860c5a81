"""State that an optimizer quantises in blocks of a parameter, as separate tensors.

Nothing here knows a library's classes. An optimizer like the given one makes a step on parameters
of two lengths: a state tensor that is as long both times is a table, and one that grows with the
parameter has one element for each block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .probe import builder, longest, trying

__all__: list[str] = []

_NESTED = "__bnb_optimizer_quant_state__"  # as bitsandbytes' state_dict() keeps what it quantises
TABLE = 0


def tensors_of(state: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Returns the state of a parameter of `shape` with plain tensors only.

    Those inside a tensor subclass (torchao) come one by one, as `exp_avg.codes`, and so do the rows
    of a tensor that stacks several (AdEMAMix), as `state1#0`. They share memory with the state.
    """
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == _NESTED and isinstance(value, Mapping):
            found |= tensors_of(value, shape)
        elif not isinstance(value, Tensor):
            found[key] = value
        elif type(value) not in (Tensor, nn.Parameter) and hasattr(value, "__tensor_flatten__"):
            names = value.__tensor_flatten__()[0]
            found |= {f"{key}.{name}": getattr(value, name) for name in names}
        elif _is_stacked(value, shape):
            found |= {f"{key}#{number}": row for number, row in enumerate(value)}
        else:
            found[key] = value
    return found


def joined(tensors: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The inverse of `tensors_of`. `make` returns a state whose tensor subclasses are filled."""
    found: dict[str, Any] = {}
    if any("." in key for key in tensors):
        found = make()
        for key, value in tensors_of(found, ()).items():
            if "." in key:
                value.copy_(tensors[key].view(value.shape))
    rows: dict[str, list[Any]] = {}
    for key in sorted(key for key in tensors if "#" in key):
        rows.setdefault(key.partition("#")[0], []).append(tensors[key])
    stacked = {key: torch.stack(each) for key, each in rows.items()}
    plain = {key: value for key, value in tensors.items() if "#" not in key and "." not in key}
    return found | stacked | plain


def _is_stacked(value: Tensor, shape: tuple[int, ...]) -> bool:
    own = tuple(value.shape)
    return own != tuple(shape) and (own[1:] == tuple(shape) or len(own) == 2) and bool(own)


def fresh_state(
    optimizer: Any, group: Mapping[str, Any], like: Tensor, held: Tensor | None = None
) -> dict[str, Any]:
    """Returns the state, with any values, that the optimizer makes for a parameter like `like`.

    bitsandbytes can be told to keep the state of some parameters otherwise, by their ids: `held` is
    a parameter whose setting counts.
    """
    with trying(like.device):
        parameter = nn.Parameter(torch.zeros_like(like.detach()))
        parameter.grad = torch.zeros_like(parameter)
        made = builder(optimizer, group)([parameter])
        settings = getattr(getattr(optimizer, "mng", None), "pid2config", {})
        settings.pop(id(parameter), None)  # of one that is gone
        if id(held) in settings:
            settings[id(parameter)] = settings[id(held)]
        try:
            made.step()
        finally:
            settings.pop(id(parameter), None)
        return dict(made.state[parameter])


def blocks_of(optimizer: Any, group: Mapping[str, Any]) -> dict[str, int]:
    """For each tensor of the state that is not as long as its parameter: how many elements of the
    parameter each of its own stands for, or `TABLE`.

    Raises:
        TypeError: A tensor grows with the parameter in another way.
    """
    device, align = group["params"][0].device, group["align"]
    most = max(longest(optimizer, group), 1 << 14)
    lengths = [align * (blocks + -(-most // align)) for blocks in (96, 160)]
    first, second = (
        tensors_of(fresh_state(optimizer, group, torch.empty(length, device=device)), (length,))
        for length in lengths
    )
    found = {}
    for key, value in first.items():
        if isinstance(value, Tensor) and value.dim() and value.numel() != lengths[0]:
            sizes = [value.numel(), second[key].numel() if key in second else 0]
            block = lengths[0] // max(1, sizes[0])
            if len(set(sizes)) > 1 and (not block or [block * n for n in sizes] != lengths):
                raise TypeError(
                    f"{type(optimizer).__name__}'s {key!r} has {sizes[0]} elements for {lengths[0]}"
                    f" of a parameter, and {sizes[1]} for {lengths[1]}: these are no blocks of "
                    "align elements or fewer. Give the optimizer whole parameters, or another align"
                )
            found[key] = block if len(set(sizes)) > 1 else TABLE
    return found
