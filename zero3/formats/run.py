"""A training run as any of the formats holds it: what a conversion takes out of one and puts into
another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ..checkpoint.lazy import Lazy
from .pickled import Global, Made

__all__: list[str] = []

_NOTHING = object()


@dataclass(frozen=True)
class Holds:
    """What a format has a place for, beside numbers, text, lists, tuples, dicts and tensors in
    them.
    """

    nested: bool = True  # tensors inside of an optimizer's options and of lists in its state
    empty: bool = True  # parameters without elements in an optimizer
    config: bool = False  # of a Hugging Face model


@dataclass
class Run:
    """Names are the unwrapped model's. A tied tensor stands under its first name, and its other
    names in `also`.

    State holds a `Lazy` for what has dimensions, and numbers and 0-dim tensors as they are. Nothing
    in it is a `Made`.
    """

    kind: str
    tensors: dict[str, Lazy]
    also: dict[str, list[str]] = field(default_factory=dict)
    # of the tensors; those of formats that don't tell are not among them
    buffers: set[str] = field(default_factory=set)
    # of modules, by the names of state dicts
    extra_states: dict[str, Any] = field(default_factory=dict)
    # options, and names in "params"; None: there is no optimizer
    groups: list[dict[str, Any]] | None = None
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    # of each group's optimizer, where they are known
    classes: list[str] = field(default_factory=list)
    extra: Any = None
    config: Any = None  # of a Hugging Face model
    ranks: int = 1  # that wrote it
    ranks_asked_for: int | None = None  # that are to load it, where that matters
    left_out: list[str] = field(default_factory=list)  # what can't go along, in words

    def lazies(self) -> Iterator[Lazy]:
        """Every tensor of model and optimizer."""
        yield from self.tensors.values()
        for values in self.state.values():
            yield from (value for value in values.values() if isinstance(value, Lazy))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: lazy.shape for name, lazy in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        return sum(lazy.nbytes for lazy in self.lazies())

    def check(self) -> None:
        """Raises ValueError unless the optimizer is of the model."""
        listed = [name for group in self.groups or () for name in group["params"]]
        known = {*self.tensors, *(alias for names in self.also.values() for alias in names)}
        if unknown := [name for name in [*listed, *self.state] if name not in known]:
            raise ValueError(
                "the optimizer has parameters that the model has not: "
                f"{', '.join(map(str, unknown[:6]))}"
            )
        counts = Counter(listed)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"param_groups name {twice[0]} twice")
        if missing := [name for name in self.state if name not in counts]:
            raise ValueError(
                f"there is state of parameters that are in no group: {', '.join(missing[:6])}"
            )

    def leave_out(self, holds: Holds) -> None:
        """Takes out what the format to be written can't hold, key by key, and names it in
        `left_out`.
        """

        def number(tensor: Tensor | Lazy) -> bool:
            return holds.nested or (isinstance(tensor, Tensor) and not tensor.dtype.is_complex)

        self.extra = _kept(self.extra, "extra", self.left_out)
        self.extra = None if self.extra is _NOTHING else self.extra
        self.extra_states = _kept(self.extra_states, "extra_states", self.left_out)
        self.groups = _kept(self.groups, "param_groups", self.left_out, number)
        for name, values in self.state.items():
            found = {}
            for key, value in values.items():
                fits = None if isinstance(value, Lazy) else number
                found[key] = _kept(value, f"state[{name!r}][{key!r}]", self.left_out, fits)
            self.state[name] = {key: value for key, value in found.items() if value is not _NOTHING}
        if self.config is not None and not holds.config:
            self.left_out.append("config (of the Hugging Face model)")
        for at, group in enumerate(self.groups or ()) if not holds.empty else ():
            empty = {name for name, lazy in self.tensors.items() if not lazy.numel}
            for name in [name for name in group["params"] if name in empty]:
                self.left_out.append(f"{name} of param_groups[{at}] (a parameter without elements)")
                group["params"].remove(name)
                self.state.pop(name, None)


def _kept(
    value: Any, path: str, left_out: list[str], fits: Callable[[Tensor | Lazy], bool] | None = None
) -> Any:
    """What of `value` is plain, or a tensor that `fits` (None: any does).

    Of a dict the rest goes along; in a list None stands for what is left out. Paths name that.
    """
    if isinstance(value, dict):
        items = {}
        for key, held in value.items():
            if not _is_key(key):
                left_out.append(f"{path} at a key ({kind_of(key)})")
            elif (found := _kept(held, f"{path}[{key!r}]", left_out, fits)) is not _NOTHING:
                items[key] = found
        return type(value)(items)
    if type(value) in (list, tuple):
        each = [
            _kept(item, f"{path}[{number}]", left_out, fits) for number, item in enumerate(value)
        ]
        return type(value)(None if item is _NOTHING else item for item in each)
    if _is_key(value) or (isinstance(value, Tensor | Lazy) and (fits is None or fits(value))):
        return value
    left_out.append(f"{path} ({kind_of(value)})")
    return _NOTHING


def _is_key(value: Any) -> bool:
    return (
        value is None
        or type(value) in (bool, int, float, str)
        or (type(value) is tuple and all(map(_is_key, value)))
    )


def kind_of(value: Any) -> str:
    """The type of what can't go along, by the name that its own system has for it."""
    if isinstance(value, Made) and value.name == "copyreg._reconstructor" and value.arguments:
        return kind_of(value.arguments[0])
    if isinstance(value, Tensor | Lazy):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    return value.name if isinstance(value, Made | Global) else type(value).__name__
