"""Puts saved state into an optimizer: planned and allocated before anything changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.plain_values import decode_scalar, decode_scalars, dtype_named, name_of
from ..guards.unreached import state_begun
from ..optim.low_bit import fresh_state, tensors_of
from ..optim.probe import builder, kind_in_state, state_keys
from ..optim.several import Together
from ..optim.state_memory import empty_state
from .contents import Contents, NamedSpan, listed
from .saved_optimizer import Held, Holding, NamedState, OptimizerContents, in_full

__all__: list[str] = []

_log = logging.getLogger("zero3")
_NOTHING = "the optimizer's state does not fit; nothing was loaded"

_FLAT = ((4,), (6144,))  # shapes for the steps: some optimizers keep other keys for small tensors
_SMALL, _LARGE = (6, 5, 2, 2, 2, 2), (64, 96, 2, 2, 2, 2)
_ACTUAL = 1 << 14  # elements; a whole parameter with no more is also tried in its own shape


class Target(NamedTuple):
    """Values of the new state, and whose they are.

    `start`: where they begin in the flattened parameter's state; None: the state has another shape,
    and all of it belongs here.
    """

    name: str
    key: str
    start: int | None
    values: Tensor


class _Begins(NamedTuple):
    """State that an optimizer begins with, of values that are not known yet."""

    parameter: Tensor
    group: int
    span: NamedSpan
    state: dict[str, Tensor]  # 1-D


@dataclass
class Placing:
    """The new state. The optimizer does not change before `commit`."""

    optimizer: Together
    options: list[dict[str, Any]]
    state: list[tuple[Tensor, dict[str, Any]]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    # of names that have no state, while others in the same parameter have
    _begins: list[_Begins] = field(default_factory=list)

    def commit(self) -> None:
        """The parameters have their new values."""
        for group, options in zip(self.optimizer.param_groups, self.options, strict=True):
            group.update(options)
        for parameter, number, span, state in self._begins:
            owner, group = self.optimizer.owners[number], self.optimizer.param_groups[number]
            begun = state_begun(owner, group, span.of(parameter.data.view(-1)))
            for key, flat in state.items():
                flat.copy_(begun.get(key, torch.zeros(())))
        self.optimizer.replace_state(self.state)
        for member in self.optimizer.members:  # as torch's own load does
            for hook in getattr(member, "_optimizer_load_state_dict_post_hooks", {}).values():
                hook(member)

    def allocate(self, held: Held, named: dict[str, NamedState]) -> None:
        """Makes tensors for the state of one parameter. `named`: the state of the names in it, also
        on other ranks. One that no gradient had reached has none: it gets what the optimizer begins
        with, and the number of steps of the others.
        """
        parameter, first = held.parameter, next(each for each in named.values() if each.keys)
        begun = {name for name, each in named.items() if each.keys}
        device = parameter.device
        state = decode_scalars(first.scalars, device)
        covered = sum(span.numel for span in held.spans) == parameter.numel()
        for key, dtype in first.elements.items():
            state[key] = empty_state(parameter, dtype_named(dtype))
            if not covered:
                state[key].zero_()  # padding is zero
            flat = state[key].view(-1)  # a view of the state: that itself is a view of nothing
            for span in (span for span in held.spans if span.numel):
                if span.name in begun:
                    self.targets.append(Target(span.name, key, span.start, span.of(flat)))
        for span in (span for span in held.spans if span.numel and span.name not in begun):
            flats = {key: span.of(state[key].view(-1)) for key in first.elements}
            self._begins.append(_Begins(parameter, held.group, span, flats))
        for key, (dtype, shape) in first.whole.items():
            state[key] = torch.empty(shape, dtype=dtype_named(dtype), device=device)
            self.targets.append(Target(held.filled[0].name, key, None, state[key]))
        self.state.append((parameter, state))

    def allocate_in_blocks(
        self, held: Held, named: NamedState, shape: tuple[int, ...]
    ) -> list[str]:
        """As `allocate`, for an aligned parameter, which is one of the model's, of `shape`, or a
        piece of it. The optimizer makes the tensors. Returns where it keeps others, in words.
        """
        (span,) = held.filled
        together, number = self.optimizer, held.group
        owner, group = together.owners[number], together.param_groups[number]
        state = fresh_state(owner, group, held.parameter, held.parameter)
        blocks = together.blocks(number)
        kept: dict[str, tuple[str, tuple[int, ...]]] = {}
        numbers = set()
        for key, value in tensors_of(state, held.parameter.shape).items():
            if not isinstance(value, Tensor) or not value.dim():
                numbers.add(key)
            else:
                full = in_full(value, blocks[key], shape) if key in blocks else shape
                kept[key] = name_of(value.dtype), full
                own = held.cut(span, key, value, blocks)
                if value.numel():
                    flat, start = (value, None) if own is None else (value.view(-1), own.start)
                    self.targets.append(Target(span.name, key, start, flat))
        state |= decode_scalars(named.scalars, held.parameter.device)
        self.state.append((held.parameter, state))
        saved = named.tensors(shape)
        return [
            f"{key} of {span.name} is a number on one side only"
            for key in sorted(numbers ^ named.scalars.keys())
        ] + [
            f"{key} of {span.name} is {_told(saved.get(key))}, expected {_told(kept.get(key))}"
            for key in sorted({*saved, *kept})
            if saved.get(key) != kept.get(key)
        ]


def _told(found: tuple[str, tuple[int, ...]] | None) -> str:
    return "nothing" if found is None else f"{found[0]} {list(found[1])}"


def place(holding: Holding, own: OptimizerContents, source: OptimizerContents) -> Placing:
    """Plans where the state of `source` goes, and allocates tensors for it. Raises ValueError if
    names are missing or unknown, options or steps differ within one parameter of this optimizer, or
    the optimizer would not keep the state. One error names all problems.
    """
    optimizer, contents = holding.optimizer, holding.contents
    problems = _problems_of_groups(optimizer, own, source, contents)
    problems += _problems_of_kinds(own, source)
    if stacks := _problems_of_stacks(holding, source):
        raise ValueError(f"{_NOTHING}. {'. '.join(stacks)}")  # all others follow from these
    problems += _KeptKeys(holding, source).problems()
    by_name = source.options_by_name()
    placing = Placing(optimizer, [])
    for (_, names), group in zip(own.groups, optimizer.param_groups, strict=True):
        known = [name for name in names if name in by_name]
        filled = [name for name in known if 0 not in contents.shape(name)] or known
        placing.options.append(_decoded(by_name[filled[0]] if filled else {}, group))
    for one in holding.held:
        named = {name: source.state.get(name, NamedState()) for name in one.names}
        if any(state.keys for state in named.values()):
            if optimizer.is_aligned(one.group):
                ((name, state),) = named.items()
                problems += placing.allocate_in_blocks(one, state, contents.shape(name))
                continue
            problems += _problems_of_slices(one, named, contents)
            if not problems:
                placing.allocate(one, named)
    if problems:
        raise ValueError(f"{_NOTHING}. {'. '.join(problems)}")
    if contents.is_first and (kinds := _other_kinds(own, source)) is not None:
        what = "the state of %s is loaded into %s; options that both have are those that were saved"
        _log.warning(what, *kinds)
    return placing


def _other_kinds(own: OptimizerContents, source: OptimizerContents) -> tuple[str, str] | None:
    """Tells the classes of the optimizers that were saved, and of those here, if they differ."""
    if not source.kinds or set(source.kinds) == set(own.kinds):
        return None
    return " and ".join(dict.fromkeys(source.kinds)), " and ".join(dict.fromkeys(own.kinds))


def _decoded(options: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """Decodes options. A tensor comes to the device of the one that it replaces."""
    return {
        key: decode_scalar(value, getattr(group.get(key), "device", "cpu"))
        for key, value in options.items()
    }


def _problems_of_groups(
    optimizer: Together,
    own: OptimizerContents,
    source: OptimizerContents,
    contents: Contents,
) -> list[str]:
    """Compares names and options. The result is the same on every rank.

    Frozen and empty parameters have no state, so they may be in the groups or not.
    """

    def is_empty(name: str) -> bool:
        return 0 in contents.shape(name)

    def has_state(name: str) -> bool:
        return not contents.knows(name) or (contents.trains(name) and not is_empty(name))

    options = source.options_by_name()
    expected = own.options_by_name()
    missing = [name for name in expected if has_state(name) and name not in options]
    unknown = [name for name in {**options, **source.state} if name not in expected]
    unknown = [name for name in unknown if name in source.state or has_state(name)]
    unknown = [name for name in unknown if not contents.knows(name) or not is_empty(name)]
    problems = listed({"missing": missing, "unknown": unknown})
    if problems and (kinds := _other_kinds(own, source)) is not None:
        apart = f"saved was the state of {kinds[0]}, and here is {kinds[1]}"
        problems.append(f"{apart}: pass as many optimizers, in a list, as were saved")
    for (_, names), label in zip(own.groups, optimizer.labels, strict=True):
        by_options: dict[str, str] = {}
        for name in names:
            if name in options and not is_empty(name):
                by_options.setdefault(json.dumps(options[name], sort_keys=True), name)
        if len(by_options) > 1:
            (one, name), (other, second), *_ = by_options.items()
            problems.append(
                f"{name} and {second} are in one group here ({label}) and had different options: "
                f"{one} and {other}. Make the groups with param_groups(model, ...)"
            )
    return problems


def _problems_of_kinds(own: OptimizerContents, source: OptimizerContents) -> list[str]:
    """Finds parameters that another of several optimizers has trained: its state is other."""
    saved = source.kinds_by_name()
    problems = []
    for (_, names), kind in zip(own.groups, own.kinds, strict=True):
        others = {saved.get(name, kind) for name in names} & set(own.kinds) - {kind}
        for other in sorted(others):
            moved = ", ".join(name for name in names if saved.get(name) == other)
            what = f"trained by {other} when it was saved, and given to {kind} here"
            problems.append(f"{what}: {moved}")
    return problems


def _problems_of_stacks(holding: Holding, source: OptimizerContents) -> list[str]:
    """Finds state that stacks several tensors (AdEMAMix), and was saved of whole parameters and is
    loaded into aligned ones, or the other way round. Files of aligned ones have the rows apart.
    """
    optimizer = holding.optimizer
    found: dict[str, list[str]] = {}
    for one in holding.held:
        for name in (span.name for span in one.filled):
            saved, own = source.state.get(name, NamedState()), list(holding.contents.shape(name))
            stacked = any(shape[1:] == own for _, shape in saved.whole.values())
            apart = any("#" in key for key in saved.keys)
            differs = stacked if optimizer.is_aligned(one.group) else apart
            if differs:
                how = f"{optimizer.kinds[one.group]} held {'whole' if stacked else 'aligned'}"
                found.setdefault(how, []).append(name)
    return [
        f"{', '.join(names[:6] + ['...'] * (len(names) > 6))}: {how} parameters when it was saved, "
        "and it stacks several tensors of its state in one. Here these parameters are cut in "
        "another way. Give param_groups the options that it had then, or carry the state over by "
        "full_optimizer_state_dict and load_full_optimizer_state_dict"
        for how, names in found.items()
    ]


def _problems_of_slices(held: Held, named: dict[str, NamedState], contents: Contents) -> list[str]:
    """Compares the states of all names in one parameter, which has one step, one set of moments."""
    problems = []
    (first, expected), *others = [pair for pair in named.items() if pair[1].keys]
    for name, state in others:
        if state.scalars != expected.scalars or state.elements != expected.elements:
            both = (str({**each.scalars, **each.elements}) for each in (expected, state))
            problems.append(
                f"{first} and {name} are slices of one parameter of the optimizer here, and had "
                f"different state: {' and '.join(both)}. Make the optimizer from "
                "param_groups(model, ...), where parameters are apart"
            )
    for name, state in named.items() if not held.is_whole(contents) else ():
        for key, (_, shape) in state.whole.items():
            problems.append(
                f"{key} of {name} has {tuple(shape)}, expected {contents.shape(name)}: state "
                "of another shape needs a parameter that is whole or aligned (param_groups with "
                "whole or align)"
            )
    return problems


class _KeptKeys:
    """The keys that this run's optimizers keep. With others, their next step would raise KeyError.

    Each makes steps on small tensors, as in `check_optimizer`, so no list of classes is needed.
    Steps are made once for each group, dtype and number of dimensions.
    """

    def __init__(self, holding: Holding, source: OptimizerContents) -> None:
        self._optimizer, self._contents = holding.optimizer, holding.contents
        self._flat = [e for e in holding.held if not self._optimizer.is_aligned(e.group)]
        self._source = source
        self._options = source.options_by_name()
        self._kinds = source.kinds_by_name()
        self._asked: dict[Any, list[dict[str, str]]] = {}  # by group, dtype, shapes and options

    def problems(self) -> list[str]:
        """Returns the problems in words, equal ones together."""
        found: dict[str, list[str]] = {}
        for one in self._flat:
            for span in one.filled:
                saved = self._source.state.get(span.name, NamedState())
                if saved.keys and (problem := self._problem(one, span.name, saved)) is not None:
                    found.setdefault(problem, []).append(span.name)
        few = {why: names[:6] + ["..."] * (len(names) > 6) for why, names in found.items()}
        return [f"{', '.join(names)}: {why}" for why, names in few.items()]

    def _problem(self, held: Held, name: str, saved: NamedState) -> str | None:
        keys = set(saved.keys)
        allowed = self._kept(held, name, None)
        if own := self._optimizer.state.get(held.parameter):
            ndim = held.parameter.ndim
            allowed = [*allowed, {key: kind_in_state(value, ndim) for key, value in own.items()}]
        if not allowed:
            return None  # it fails on small tensors and has no state yet, so its keys are unknown
        here, there = self._optimizer.kinds[held.group], self._kinds.get(name)
        fitting = [kept for kept in allowed if set(kept) == keys]
        if not fitting and there == here and any(set(kept) < keys for kept in allowed):
            # keys that the saved options do not explain either have come with a later step
            explained = self._kept(held, name, self._options.get(name))
            fitting = [] if any(set(kept) == keys for kept in explained) else [{}]
        if not fitting:
            kept, by = max(allowed, key=len), f" by {there}" if there is not None else ""
            return (
                f"{here}, as it was made here, keeps {_listed(kept)}, and the state that was saved"
                f"{by} has {_listed(keys)}. Make the optimizer of the class and with the options "
                "that it had when it was saved, or load without an optimizer"
            )
        shape = self._contents.shape(name)
        found = {
            key: (kind_in_state(value, 0), "no tensor of its shape")
            for key, value in saved.scalars.items()
        }
        for key, (dtype, of) in saved.tensors(shape).items():
            like = torch.empty(of, dtype=dtype_named(dtype), device="meta")
            found[key] = kind_in_state(like, len(shape)), dtype
        for key, (kind, which) in found.items():
            if not shape and kind != "text":  # of () all else is a number
                continue
            kinds = {kept[key] for kept in fitting if key in kept}
            if kinds and kind not in kinds:
                return f"{key} is {kind} ({which}), expected {' or '.join(sorted(kinds))}"
        return None

    def _kept(self, held: Held, name: str, saved: dict[str, Any] | None) -> list[dict[str, str]]:
        """Returns the keys that an optimizer like this one keeps.

        It has the options of this one's group or, if they are given, the `saved` ones.
        """
        shapes, dtype = self._shapes(held, name), held.parameter.dtype
        asked = held.group, dtype, shapes, str(saved)
        if asked not in self._asked:
            group = dict(self._optimizer.param_groups[held.group])
            if saved is not None:
                group |= decode_scalars(saved, "cpu")
            build = builder(self._optimizer.owners[held.group], group)
            self._asked[asked] = state_keys(build, held.parameter.device, dtype, shapes)
        return self._asked[asked]

    def _shapes(self, held: Held, name: str) -> tuple[tuple[int, ...], ...]:
        shape = self._contents.shape(name)
        if not held.is_whole(self._contents):
            return _FLAT
        if len(shape) < 2:
            return ((),) if not shape else _FLAT
        shapes = _SMALL[: len(shape)], _LARGE[: len(shape)]
        return (*shapes, shape) if 0 < torch.Size(shape).numel() <= _ACTUAL else shapes


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(keys)) or "nothing"
