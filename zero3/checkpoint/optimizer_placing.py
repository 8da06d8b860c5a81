"""Puts state by names into an optimizer whose parameters are slices. It is planned and allocated first, and changes all at once."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.plain_values import decode_scalar, dtype_named
from ..optim.several import Together
from ..optim.state_memory import empty_state
from .contents import Contents, Span, listed
from .optimizer_contents import Held, NamedState, OptimizerContents, is_whole
from .optimizer_keys import KeptKeys

__all__: list[str] = []

_log = logging.getLogger("zero3")


class Target(NamedTuple):
    """A flattened tensor of the new state, and the span of a parameter's state that belongs into it."""

    key: str
    span: Span
    flat: Tensor

    @property
    def place(self) -> Tensor:
        return self.flat[self.span.offset : self.span.offset + self.span.stop - self.span.start]


@dataclass
class Placing:
    """The new state. The optimizer does not change before `commit`."""

    optimizer: Together
    options: list[dict[str, Any]]
    state: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)  # tensors that are filled by ranges
    whole: list[tuple[str, str, Tensor]] = field(default_factory=list)  # name, key, and a tensor that is filled as a whole

    def commit(self) -> None:
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.update(options)
        self.optimizer.replace_state(self.state)
        for member in self.optimizer.members:  # as torch's own load does
            for hook in getattr(member, "_optimizer_load_state_dict_post_hooks", {}).values():
                hook(member)


def place(optimizer: Together, held: list[Held], own: OptimizerContents, source: OptimizerContents, contents: Contents) -> Placing:
    """Plans where the state of `source` goes, and allocates tensors for it.

    Raises:
        ValueError: Names are missing or unknown, options or steps differ within one parameter of this optimizer, or the optimizer
            would not keep the state. One error names all problems.
    """
    problems = _problems_of_groups(optimizer, own, source, contents) + _problems_of_kinds(own, source)
    problems += KeptKeys(optimizer, source, contents).problems(held, source)
    by_name = _options(source)
    known = [[name for name in names if name in by_name] for _, names in own.groups]
    filled = [[name for name in names if 0 not in contents.shape(name)] or names for names in known]
    options = [by_name[names[0]] if names else {} for names in filled]
    placing = Placing(optimizer, [_decoded(mine, group) for mine, group in zip(options, optimizer.param_groups, strict=True)])
    for one in held:
        named = {span.name: source.state.get(span.name, NamedState()) for span in one.filled}
        if any(vars(state) != vars(NamedState()) for state in named.values()):
            problems += _problems_of_slices(one, named, contents)
            if not problems:
                _allocate(placing, one, named)
    if problems:
        raise ValueError(f"the optimizer's state does not fit; nothing was loaded. {'. '.join(problems)}")
    if source.kinds and set(source.kinds) != set(own.kinds) and contents.is_first:
        saved, here = (" and ".join(dict.fromkeys(kinds)) for kinds in (source.kinds, own.kinds))
        _log.warning("the state of %s is loaded into %s; options that both have are those that were saved", saved, here)
    return placing


def _decoded(options: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Decodes options. A tensor, such as a learning rate, is made on the device of the tensor that it replaces."""
    now = {key: group.get(key) for key in options}
    devices = {key: value.device if isinstance(value, Tensor) else torch.device("cpu") for key, value in now.items()}
    return {key: decode_scalar(value, devices[key]) for key, value in options.items()}


def _options(source: OptimizerContents) -> dict[str, dict[str, Any]]:
    return {name: options for options, names in source.groups for name in names}


def _problems_of_groups(optimizer: Together, own: OptimizerContents, source: OptimizerContents, contents: Contents) -> list[str]:
    """Compares names and options. The result is the same on every rank. Frozen and empty parameters have no state, so they may be
    in the groups or not."""
    options = _options(source)
    expected = {name for _, names in own.groups for name in names}
    matters = [name for _, names in own.groups for name in names if contents.trains(name) and 0 not in contents.shape(name)]
    missing = [name for name in matters if name not in options]
    unknown = [name for name in [*options, *(name for name in source.state if name not in options)] if name not in expected]
    unknown = [name for name in unknown if name in source.state or not contents.knows(name) or contents.trains(name)]
    unknown = [name for name in unknown if not contents.knows(name) or 0 not in contents.shape(name)]
    problems = listed({"missing": missing, "unknown": unknown})
    if problems and source.kinds and set(source.kinds) != set(own.kinds):
        saved, here = (" and ".join(dict.fromkeys(kinds)) for kinds in (source.kinds, own.kinds))
        problems.append(f"saved was the state of {saved}, and here is {here}: pass as many optimizers, in a list, as were saved")
    for number, (_, names) in enumerate(own.groups):
        by_options: dict[str, str] = {}
        for name in names:
            if name in options and 0 not in contents.shape(name):
                by_options.setdefault(json.dumps(options[name], sort_keys=True), name)
        if len(by_options) > 1:
            first, second, *_ = by_options.items()
            problems.append(
                f"{first[1]} and {second[1]} are in one group here ({optimizer.labels[number]}) and had different options: {first[0]} and "
                f"{second[0]}. Make the groups with param_groups(model, ...)"
            )
    return problems


def _problems_of_kinds(own: OptimizerContents, source: OptimizerContents) -> list[str]:
    """Finds parameters that another one of several optimizers has trained before: its state is of another kind."""
    saved = {name: kind for (_, names), kind in zip(source.groups, source.kinds, strict=False) for name in names}
    problems = []
    for (_, names), kind in zip(own.groups, own.kinds, strict=True):
        for other in sorted({saved.get(name, kind) for name in names} & set(own.kinds) - {kind}):
            moved = ", ".join(name for name in names if saved.get(name) == other)
            problems.append(f"trained by {other} when it was saved, and given to {kind} here: {moved}")
    return problems


def _problems_of_slices(held: Held, named: dict[str, NamedState], contents: Contents) -> list[str]:
    """Compares the states of all names in one parameter of the optimizer, which has one step and one set of moments."""
    problems = []
    (first, expected), *others = named.items()
    for name, state in others:
        if state.scalars != expected.scalars or state.elements != expected.elements:
            found = " and ".join(str({**each.scalars, **each.elements}) for each in (expected, state))
            problems.append(
                f"{first} and {name} are slices of one parameter of the optimizer here, and had different state: {found}. "
                "Make the optimizer from param_groups(model, ...), where parameters are apart"
            )
    for name, state in named.items():
        for key, (_, shape) in state.whole.items() if not is_whole(held, contents) else ():
            problems.append(
                f"{key} of {name} has {tuple(shape)}, expected {contents.shape(name)}: other shapes go with whole parameters only "
                "(param_groups with whole=True)"
            )
    return problems


def _allocate(placing: Placing, held: Held, named: dict[str, NamedState]) -> None:
    parameter, first = held.parameter, next(iter(named.values()))
    state: dict[str, Any] = {key: decode_scalar(value, parameter.device) for key, value in first.scalars.items()}
    covered = sum(span.stop - span.start for span in held.spans) == parameter.numel()
    for key in first.elements:
        state[key] = empty_state(parameter, dtype_named(first.elements[key]))
        if not covered:
            state[key].zero_()  # padding is zero
        flat = state[key].view(-1)  # a view of the state, so that the state itself is a view of nothing
        placing.targets += [Target(key, span, flat) for span in held.spans if span.start < span.stop]
    for key, (name_of_dtype, shape) in first.whole.items():
        state[key] = torch.empty(shape, dtype=dtype_named(name_of_dtype), device=parameter.device)
        placing.whole.append((held.filled[0].name, key, state[key]))
    placing.state.append((parameter, state))
