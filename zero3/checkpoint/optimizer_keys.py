"""Checks that saved state has the keys that this optimizer keeps. With other keys, its next step would raise KeyError.

Each optimizer makes steps on small tensors, as in `check_optimizer`, so no list of classes is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm.plain_values import decode_scalar, dtype_named, kind_of
from ..optim.probe import builder, state_keys
from ..optim.several import Together
from .contents import Contents
from .optimizer_contents import Held, NamedState, OptimizerContents, is_whole

__all__: list[str] = []

_FLAT = ((4,), (6144,))  # shapes for the steps: some optimizers keep other keys for small tensors
_SMALL, _LARGE = (6, 5, 2, 2, 2, 2), (64, 96, 2, 2, 2, 2)
_ACTUAL = 1 << 14  # elements; a whole parameter with no more is also tried in its own shape


class KeptKeys:
    """The keys that the optimizers keep. Steps are made once for each group and number of dimensions."""

    def __init__(self, optimizer: Together, source: OptimizerContents, contents: Contents) -> None:
        self._optimizer = optimizer
        self._contents = contents
        self._options = {name: options for options, names in source.groups for name in names}
        self._kinds = {name: kind for (_, names), kind in zip(source.groups, source.kinds, strict=False) for name in names}
        self._asked: dict[tuple[int, tuple[tuple[int, ...], ...], str], list[dict[str, str]]] = {}

    def problems(self, held: list[Held], source: OptimizerContents) -> list[str]:
        """Returns the problems in words, equal ones together."""
        found: dict[str, list[str]] = {}
        for one in held:
            for span in one.filled:
                saved = source.state.get(span.name, NamedState())
                if vars(saved) != vars(NamedState()) and (problem := self._problem(one, span.name, saved)) is not None:
                    found.setdefault(problem, []).append(span.name)
        return [f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}: {problem}" for problem, names in found.items()]

    def _problem(self, held: Held, name: str, saved: NamedState) -> str | None:
        dtypes = {**saved.elements, **{key: dtype for key, (dtype, _) in saved.whole.items()}}
        keys = {*saved.scalars, *dtypes}
        allowed = self._kept(held, name, None)
        if own := self._optimizer.state.get(held.parameter):
            allowed = [*allowed, {key: kind_of(value.dtype) if isinstance(value, Tensor) else "number" for key, value in own.items()}]
        if not allowed:
            return None  # it fails on small tensors and has no state yet, so its keys are unknown
        here, there = self._optimizer.kinds[held.group], self._kinds.get(name)
        fitting = [kept for kept in allowed if set(kept) == keys]
        if not fitting and there == here and any(set(kept) < keys for kept in allowed):
            # keys that the saved options do not explain either have come with a later step
            fitting = [] if any(set(kept) == keys for kept in self._kept(held, name, self._options.get(name))) else [{}]
        if not fitting:
            kept, by = max(allowed, key=len), f" by {there}" if there is not None else ""
            return (
                f"{here}, as it was made here, keeps {_listed(kept)}, and the state that was saved{by} has {_listed(keys)}. Make the "
                "optimizer of the class and with the options that it had when it was saved, or load without an optimizer"
            )
        for key, dtype in dtypes.items():
            kinds = {kept[key] for kept in fitting if key in kept} - {"number"}
            if kinds and kind_of(dtype_named(dtype)) not in kinds:
                return f"{key} is {kind_of(dtype_named(dtype))} ({dtype}), expected {' or '.join(sorted(kinds))}"
        return None

    def _kept(self, held: Held, name: str, saved: dict[str, Any] | None) -> list[dict[str, str]]:
        """Returns the keys that an optimizer like this one keeps, with the options of its group, or with the `saved` options."""
        shapes = self._shapes(held, name)
        place = held.group, shapes, str(saved)
        if place not in self._asked:
            group = dict(self._optimizer.param_groups[held.group])
            if saved is not None:
                group |= {key: decode_scalar(value, torch.device("cpu")) for key, value in saved.items()}
            self._asked[place] = state_keys(builder(self._optimizer.owners[held.group], group), held.parameter.device, shapes)
        return self._asked[place]

    def _shapes(self, held: Held, name: str) -> tuple[tuple[int, ...], ...]:
        shape = self._contents.shape(name)
        if not is_whole(held, self._contents):
            return _FLAT
        if len(shape) < 2:
            return ((),) if not shape else _FLAT
        shapes = _SMALL[: len(shape)], _LARGE[: len(shape)]
        return (*shapes, shape) if 0 < torch.Size(shape).numel() <= _ACTUAL else shapes


def _listed(keys: Any) -> str:
    return ", ".join(sorted(keys)) or "nothing"
