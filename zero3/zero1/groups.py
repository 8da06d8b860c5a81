"""Checks the parameters and options that a caller passes to ZeroRedundancyOptimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .division import Spread
from .local import Groups

__all__: list[str] = []


def listed(params: Any) -> list[Any]:
    """Returns parameters, pairs or groups as a list, which can be read several times."""
    unordered = isinstance(params, set | frozenset)  # ranks would have different orders
    if unordered or isinstance(params, Tensor) or not isinstance(params, Iterable):
        raise TypeError(
            f"params must be an ordered iterable of tensors or dicts, found {type(params).__name__}"
        )
    if not (items := list(params)):
        raise ValueError("ZeroRedundancyOptimizer got no parameters")
    if len({isinstance(item, dict) for item in items}) > 1 or not all(
        isinstance(item, dict | Tensor | tuple) for item in items
    ):
        found = ", ".join(sorted({type(item).__name__ for item in items}))
        raise TypeError(f"params must be tensors, or dicts of them with options, found {found}")
    return items


def checked(given: Any, number: int) -> dict[str, Any]:
    """Returns a copy of the group, or raises for mistakes that torch would let pass."""
    if not isinstance(given, dict):
        raise TypeError(f"a parameter group must be a dict, found {type(given).__name__}")
    if "params" not in given:
        raise ValueError(f"parameter group {number} has no 'params', but {sorted(given)}")
    group: dict[str, Any] = dict(given)
    if isinstance(group["params"], set):
        return group  # torch itself refuses sets
    group["params"] = (
        [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    )
    seen: dict[int, int] = {}
    for place, item in enumerate(group["params"]):
        parameter = item[1] if isinstance(item, tuple) else item
        if seen.setdefault(id(parameter), place) != place:
            raise ValueError(
                f"parameters {seen[id(parameter)]} and {place} of group {number} are the same"
            )
        if getattr(parameter, "zero3_state", None) is not None:
            raise ValueError(
                f"parameter {place} of group {number} belongs to a sharded model, of which every "
                "rank holds another slice: an optimizer over ranks is for models that every rank "
                "holds whole. Give zero3.get_trainable_chunk(model) to the plain optimizer"
            )
        if isinstance(parameter, Tensor) and parameter.layout != torch.strided:
            raise ValueError(
                f"parameter {place} of group {number} is sparse, which has no parts to spread "
                "over ranks"
            )
    return group


def check_addition(group: dict[str, Any], known: Iterable[torch.device], *, hooked: bool) -> None:
    """Checks a group that is added later. `known`: the devices. `hooked`: DDP has the hook
    already.
    """
    if hooked:
        raise RuntimeError(
            "with overlap_with_ddp=True, add parameter groups before hook(ddp): DDP reduces only "
            "what it was made with"
        )
    if foreign := next(
        (parameter.device for parameter in group["params"] if parameter.device not in known), None
    ):
        raise ValueError(
            f"parameters on {foreign} can't be added: the first ones were on "
            f"{', '.join(map(str, known))}"
        )


def spreads_of(group: dict[str, Any], number: int, *, whole: bool) -> list[Spread]:
    """`group`: the one of that number. `whole`: one rank updates all of a parameter."""
    names = group.get("param_names") or [
        f"parameter {place} of group {number}" for place in range(len(group["params"]))
    ]
    return [
        Spread(parameter, number, name, whole=whole)
        for parameter, name in zip(group["params"], names, strict=True)
    ]


def line_of(spread: Spread) -> str:
    """Describes a parameter, which must be the same on all ranks."""
    parameter, whole = spread.parameter, ", whole" if spread.whole else ""
    return (
        f"{spread.name}: group {spread.group}, {tuple(parameter.shape)} {parameter.dtype} on "
        f"{parameter.device.type}{spread.layout}{whole}"
    )


def notes_of(groups: Groups, known: Iterable[str], *, waits: bool) -> list[dict[str, str]]:
    """What each group's options are, for `changes_in`: those that the local optimizer knows.
    `waits`: also tensors on a device, which the host has to wait for.
    """
    return [
        {
            key: _said(value)
            for key, value in group.items()
            if key in known and (waits or getattr(value, "is_cpu", True))
        }
        for group in groups
    ]


def changes_in(notes: list[dict[str, str]], last: list[dict[str, str]]) -> list[str]:
    """Describes what the caller has changed in options since the `last` step, which must be the
    same on all ranks. (What the local optimizer has changed itself may depend on its shares.)
    """
    lines = list[str]()
    for number, (now, before) in enumerate(zip(notes, last, strict=True)):
        changed = (f"{key} {now[key]}" for key in sorted(now) if before.get(key) != now[key])
        lines.append(f"group {number}, changed since the last step: {', '.join(changed) or '-'}")
    return lines


def function_name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def said_of(options: Mapping[Any, Any]) -> str:
    """What ranks compare of options: numbers and words, and the types of other objects."""
    named = sorted(options.items(), key=lambda item: str(item[0]))
    return ", ".join(f"{key} {_said(value)}" for key, value in named)


def _said(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_said, value))})"
    if isinstance(value, Tensor):
        many = f"{tuple(value.shape)} {value.dtype}"
        return _said(value.item()) if value.numel() == 1 else many
    if value is None or isinstance(value, bool | str):
        return repr(value)
    if isinstance(value, Real):  # also numpy's
        number = float(value)
        return repr(int(number)) if number.is_integer() else repr(number)
    return type(value).__name__


@contextmanager
def as_values() -> Iterator[None]:
    """What is not found, as torch tells of a state dict, is a value that is wrong."""
    try:
        yield
    except LookupError as mistake:
        raise ValueError(f"not found: {mistake}") from mistake


def mistake_in(body: Callable[[], object]) -> Exception | None:
    """Runs `body` and returns its error, so that all ranks can raise it together."""
    try:
        with as_values():
            body()
    except Exception as mistake:
        return mistake
    return None
