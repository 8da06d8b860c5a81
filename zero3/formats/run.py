"""A training run as any of the formats holds it: what a conversion takes out of one and puts into another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .lazy import Lazy, mapped
from .pickled import Global, Made

__all__: list[str] = []


@dataclass
class Run:
    """Names are the unwrapped model's. A tied tensor stands under its first name, and its other names in `also`.

    State holds a `Lazy` for what has dimensions, and numbers and 0-dim tensors as they are. Nothing in it is a `Made`.
    """

    kind: str
    tensors: dict[str, Lazy]
    also: dict[str, list[str]] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)  # of the tensors; those of formats that don't tell are not among them
    extra_states: dict[str, Any] = field(default_factory=dict)  # of modules, by the names of state dicts
    groups: list[dict[str, Any]] | None = None  # options, and names in "params"; None: there is no optimizer
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    classes: list[str] = field(default_factory=list)  # of each group's optimizer, where they are known
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
    def nbytes(self) -> int:
        return sum(lazy.nbytes for lazy in self.lazies())

    def check(self) -> None:
        """Raises ValueError unless the optimizer is of the model."""
        listed = [name for group in self.groups or () for name in group["params"]]
        known = {*self.tensors, *(alias for names in self.also.values() for alias in names)}
        if unknown := [name for name in [*listed, *self.state] if name not in known]:
            raise ValueError(f"the optimizer has parameters that the model has not: {', '.join(map(str, unknown[:6]))}")
        if len(listed) != len(set(listed)):
            raise ValueError(f"param_groups name {next(name for name in listed if listed.count(name) > 1)} twice")
        if missing := [name for name in self.state if name not in set(listed)]:
            raise ValueError(f"there is state of parameters that are in no group: {', '.join(missing[:6])}")

    def keep_plain(self) -> None:
        """Takes out what only the classes of other systems could read, and says so."""
        for kind, held in (("extra state", self.extra_states), ("", self.extra)):
            for key in [key for key in held if _is_foreign(held[key])] if isinstance(held, dict) else ():
                self.left_out.append(f"{kind} {key} (an object of another system)".strip())
                del held[key]
        if _is_foreign(self.extra):
            self.extra = None


def _is_foreign(value: Any) -> bool:
    found = []
    mapped(value, lambda leaf: found.append(leaf) if isinstance(leaf, Made | Global | set | frozenset | bytes) else None)
    return bool(found)
