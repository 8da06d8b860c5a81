"""An optimizer's state by the names of the model's parameters, described.

The optimizer's own parameters may be any slices of the model's. A state tensor with the shape of
the optimizer's parameter has an element for each of its elements, and is cut as the parameter is.
A number, or a 0-dim tensor (`step`), counts for every name in the parameter. A tensor of another
shape (Adafactor's rows and columns) needs a parameter that is whole on one rank, or an aligned one:
its blocks are cut as it is. It is described as an optimizer over the unsharded model has it.

The description is the same on every rank, and holds no tensors' values. So it goes into a manifest,
a loading run compares it with what its own optimizer holds and keeps, and a foreign dict is turned
into it first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..comm.agreement import agreeing, exchange_texts
from ..comm.plain_values import decode_scalars, encode_scalar, name_of, unreadable
from ..core.chunk import Chunk, Part
from ..modules import own_name
from ..optim.check_optimizer import check_aligned, owned_by
from ..optim.low_bit import TABLE, tensors_of
from ..optim.several import Optimizers, Together
from .contents import Contents, NamedSpan

__all__: list[str] = []

_FLATTENS = "__tensor_flatten__"  # what tensor subclasses have that hold other tensors
# not options: two tell how this run divides the model, and another may divide it otherwise
_NOT_OPTIONS = ("params", "param_names", "whole", "align")

Group = tuple[dict[str, Any], list[str]]  # options, as `encode_scalar` writes them, and names
StateByName = Mapping[str, Mapping[str, Any]]  # name: key: value, as a full state dict has it


@dataclass
class NamedState:
    """Describes the state of one name, without the values of tensors."""

    elements: dict[str, str] = field(default_factory=dict)  # key: dtype, of the parameter's shape
    scalars: dict[str, Any] = field(default_factory=dict)  # key: value, by `encode_scalar`
    whole: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # key: dtype, other shape

    @property
    def keys(self) -> list[str]:
        return sorted([*self.elements, *self.scalars, *self.whole])

    def tensors(self, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Returns the dtype and the shape of each tensor. `shape`: the parameter's."""
        others = {key: (dtype, tuple(other)) for key, (dtype, other) in self.whole.items()}
        return {key: (dtype, shape) for key, dtype in self.elements.items()} | others


@dataclass
class OptimizerContents:
    """Describes an optimizer's groups, and its state by name on all ranks."""

    groups: list[Group]  # with the names in the model's order
    state: dict[str, NamedState]
    kinds: list[str] = field(default_factory=list)  # of each group: its optimizer's class, if known

    def to_json(self) -> dict[str, Any]:
        alike: dict[str, list[str]] = {}
        for name, named in self.state.items():
            text = json.dumps([named.elements, named.scalars, named.whole])
            alike.setdefault(text, []).append(name)
        state = [[names, *json.loads(text)] for text, names in alike.items()]
        return {"groups": self.groups, "classes": self.kinds, "state": state}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> OptimizerContents:
        groups = [(dict(options), list(names)) for options, names in found["groups"]]
        return cls(groups, named_states(found["state"]), list(found["classes"]))

    def options_by_name(self) -> dict[str, dict[str, Any]]:
        return {name: options for options, names in self.groups for name in names}

    def kinds_by_name(self) -> dict[str, str]:
        grouped = zip(self.groups, self.kinds, strict=False)
        return {name: kind for (_, names), kind in grouped for name in names}


def named_states(found: Iterable[Any]) -> dict[str, NamedState]:
    """Makes a state for each name. `found`: items `[names, elements, scalars, whole]`."""
    states: dict[str, NamedState] = {}
    for names, elements, scalars, whole in found:
        others = {key: (dtype, shape) for key, (dtype, shape) in whole.items()}
        states |= dict.fromkeys(names, NamedState(dict(elements), dict(scalars), others))
    return states


def options_of(group: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Returns a group's options, without its parameters, as JSON can hold them."""
    options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
    return {key: encode_scalar(value, f"{key!r} of {what}") for key, value in options.items()}


# What this run's optimizer holds


class Held(NamedTuple):
    """One of the optimizer's parameters, and the spans of the model in it. Padding has none."""

    parameter: Tensor
    group: int
    spans: tuple[NamedSpan, ...]
    # whether this rank's replica saves it here; what every rank holds whole is saved by rank 0
    mine: bool
    # all that share its state: on other ranks, too, if it is a slice of a chunk
    names: tuple[str, ...]

    @property
    def filled(self) -> tuple[NamedSpan, ...]:
        """The spans without those of empty parameters, or all spans if all are empty."""
        return tuple(span for span in self.spans if span.numel) or self.spans

    def is_whole(self, contents: Contents) -> bool:
        """Whether it is exactly one parameter of the model, in its own shape."""
        shape, filled = tuple(self.parameter.shape), self.filled
        return len(filled) == 1 and shape == contents.shape(filled[0].name)

    def cut(
        self, span: NamedSpan, key: str, value: Tensor, blocks: Mapping[str, int]
    ) -> NamedSpan | None:
        """What this rank has of a state tensor of one of its spans, in elements of the tensor that
        the uncut parameter has; None: all of it, alone or as other ranks. `blocks`: by key.
        """
        if key in blocks:
            return None if blocks[key] == TABLE else span.in_blocks(blocks[key])
        return span if value.shape == self.parameter.shape else None


class Holding:
    """Optimizers, as one, of a model with these `contents`, and what they hold of it: their
    parameters in their order, with the spans that each covers.

    Raises:
        TypeError: `given` holds something other than optimizers, or an option could only be
            pickled.
        ValueError: Two optimizers hold one parameter, or a parameter is not of this model, or is
            not aligned as its group says.
    """

    def __init__(self, given: Optimizers, contents: Contents) -> None:
        self.optimizer, self.contents = Together(given), contents
        self.held = _held_by(self.optimizer, contents)


def _held_by(optimizer: Together, contents: Contents) -> list[Held]:
    known: dict[int, tuple[tuple[NamedSpan, ...], bool, Sequence[str]]] = {}
    owned = owned_by(contents.states)
    for name, tensor in contents.others.items():
        known[id(tensor)] = (NamedSpan(name, 0, tensor.numel(), 0),), contents.is_first, ()
    for chunk in contents.chunks():
        for part in chunk.parts:
            all_names = contents.names_in(chunk) if part.parameter is chunk.shard else []
            known[id(part.parameter)] = tuple(_covered(part, chunk, contents)), True, all_names
    held = []
    for group, options in enumerate(optimizer.param_groups):
        options_of(options, optimizer.labels[group])  # raises for values that could only be pickled
        own = [owned[id(p)] for p in options["params"] if id(p) in owned and p.numel()]
        check_aligned(options, own, optimizer.kinds[group])
        for parameter in options["params"]:
            # a group that is empty on this rank holds an empty parameter
            if id(parameter) not in known and parameter.numel():
                raise ValueError(
                    f"{optimizer.labels[group]} has a parameter {tuple(parameter.shape)} that is "
                    "not of this model. Make the optimizer from get_trainable_chunk(model) or "
                    "param_groups(model, ...), after sharding."
                )
            spans, mine, names = known.get(id(parameter), ((), True, ()))
            one = Held(parameter, group, spans, mine, ())
            held.append(one._replace(names=tuple(names or (span.name for span in one.filled))))
    return held


def _covered(part: Part, chunk: Chunk, contents: Contents) -> list[NamedSpan]:
    spans = contents.spans(chunk)
    if part.parameter is chunk.shard:
        return spans
    if part.start == part.stop:  # an empty parameter, or the placeholder of a rank without elements
        empty = [other for other in chunk.parts if other.start == other.stop]
        covered = zip(empty, contents.empties(chunk) if chunk.is_first_holder else (), strict=False)
        return [span for other, span in covered if other is part and span is not None]
    inside = [span for span in spans if span.numel and part.start <= span.offset < part.stop]
    return [span._replace(offset=span.offset - part.start) for span in inside]


def _state_of(optimizer: Together, held: Held, contents: Contents) -> NamedState:
    """Describes the optimizer's state of one of its parameters.

    Raises:
        TypeError: A value is neither a number nor a tensor, or is a tensor of another shape and the
            parameter is neither whole nor aligned.
        ValueError: A block of the state lies on two ranks.
    """
    found = NamedState()
    kind, where = optimizer.kinds[held.group], held.spans[0].name if held.spans else "padding"
    own, blocks = tuple(held.parameter.shape), optimizer.blocks(held.group)
    for key, value in optimizer.tensors(held.group, held.parameter).items():
        what = f"{kind}'s {key!r} of {where}"
        if not isinstance(key, str) or ":" in key:
            raise TypeError(f"{what}: a key must be a string without a colon")
        if not isinstance(value, Tensor) or (not value.dim() and (own or key == "step")):
            found.scalars[key] = encode_scalar(value, what)
        elif key in blocks:
            (span,) = held.filled
            if blocks[key] and span.start % blocks[key]:
                raise ValueError(
                    f"{what} has blocks of {blocks[key]}, and this rank's slice begins inside one: "
                    "ask zero3.check_optimizer which align it needs"
                )
            shape = in_full(value, blocks[key], contents.shape(span.name))
            found.whole[key] = name_of(value.dtype), list(shape)
        elif type(value) not in (Tensor, torch.nn.Parameter) and hasattr(value, _FLATTENS):
            raise TypeError(
                f"{what} is a {type(value).__name__}, which holds other tensors: only state of "
                "aligned parameters can be saved then (param_groups with align)"
            )
        elif value.shape == own:
            found.elements[key] = name_of(value.dtype)
        elif not held.spans or held.is_whole(contents):
            found.whole[key] = name_of(value.dtype), list(value.shape)
        else:
            raise TypeError(
                f"{what} is a tensor {tuple(value.shape)} for flat slices {own} of parameters: it "
                "belongs to none of them. zero3.check_optimizer(model, optimizer) says what the "
                "optimizer needs: aligned or whole parameters (param_groups with align or whole)"
            )
    return found


def in_full(value: Tensor, length: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a tensor of blocks, or a table, has for the uncut parameter of `shape`."""
    return tuple(value.shape) if length == TABLE else (-(-torch.Size(shape).numel() // length),)


def contents_of(holding: Holding, *, with_state: bool = True) -> OptimizerContents:
    """Puts together what every rank knows of its own spans. Every rank calls it."""
    optimizer, contents = holding.optimizer, holding.contents
    groups: list[list[str]] = [[] for _ in optimizer.param_groups]
    state: list[Any] = []
    kept: list[NamedState] = []  # one for each that is held
    with agreeing(contents, "the optimizer's groups") as lines:
        labelled = zip(optimizer.param_groups, optimizer.labels, strict=True)
        options = [options_of(group, label) for group, label in labelled]
        lines += [json.dumps(own, sort_keys=True) for own in options]
        for one in holding.held:
            # only the rank where a parameter begins tells of it
            begins = one.mine and contents.writes
            names = [span.name for span in one.spans if begins and span.start == 0]
            groups[one.group] += names
            found = _state_of(optimizer, one, contents) if with_state else NamedState()
            kept.append(found)
            names = [name for name in names if not found.whole or name == one.filled[0].name]
            if names and found.keys:
                state.append([names, found.elements, found.scalars, found.whole])
    texts = exchange_texts(contents, json.dumps([groups, state]))
    merged = OptimizerContents([(own, []) for own in options], {}, optimizer.kinds)
    _add_in_order(merged, texts, contents)
    if with_state:
        _check_even(holding, kept, merged)
    return merged


def _add_in_order(merged: OptimizerContents, texts: Sequence[str], contents: Contents) -> None:
    """Adds the names and the state that each rank tells of, in the model's order."""
    order = {names[0]: place for place, names in enumerate(contents.names.values())}
    by_name: dict[str, NamedState] = {}
    for text in texts:
        their_groups, their_state = json.loads(text)
        for (_, names), more in zip(merged.groups, their_groups, strict=True):
            names += more
        by_name |= named_states(their_state)
    for _, names in merged.groups:
        names.sort(key=order.__getitem__)
    merged.state |= {name: by_name[name] for name in sorted(by_name, key=order.__getitem__)}


def _check_even(holding: Holding, kept: list[NamedState], merged: OptimizerContents) -> None:
    """Checks that every rank keeps the same keys, and has made as many steps, for its slice of a
    parameter as where that begins. Raises ValueError if a rank has made no step, or another kind of
    step. Every rank raises it.
    """
    with agreeing(holding.contents, "the optimizer's state"):
        for one, own in zip(holding.held, kept, strict=True):
            for span in one.filled if one.mine else ():
                first = merged.state.get(span.name, NamedState())
                if own.keys != first.keys:
                    raise ValueError(
                        f"the optimizer keeps {own.keys or 'nothing'} for this rank's slice of "
                        f"{span.name}, and {first.keys or 'nothing'} where that begins: all ranks "
                        "must make the same steps"
                    )
                steps, theirs = (_steps(each.scalars) for each in (own, first))
                if steps != theirs:
                    raise ValueError(
                        f"the optimizer has made {steps:g} steps with this rank's slice of "
                        f"{span.name}, and {theirs:g} where that begins: all ranks must make the "
                        "same steps"
                    )


def _steps(scalars: Mapping[str, Any]) -> float:
    """As most optimizers count them. 0: this one does not."""
    count = decode_scalars({key: scalars[key] for key in ("step",) if key in scalars}, "cpu")
    return float(count["step"]) if count else 0.0


# What a caller's dict holds


def read_full(
    state_dict: Any, contents: Contents, aligned: Iterable[str]
) -> tuple[OptimizerContents, StateByName]:
    """Returns a description of a full state dict, and its state; both by parameters' first names.

    The state of the `aligned` ones has plain tensors only. Rank 0 calls it, before anything is sent
    or changed.

    Raises:
        ValueError: Names or groups are missing or repeated, or tensors can't be read.
        TypeError: The structure is wrong, or a value could only be pickled.
    """
    expected = "expected a dict with 'state' and 'param_groups'"
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"{expected} on rank 0, found a {type(state_dict).__name__}")
    if not {"state", "param_groups"} <= set(state_dict):
        raise ValueError(f"{expected}, found the keys {list(state_dict)}")
    groups, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(groups, list | tuple) or not _are_mappings(groups):
        raise TypeError(f"param_groups must be a list of dicts, found {_shown(groups)}")
    if not isinstance(state, Mapping) or not _are_mappings(state.values()):
        what = "state must be a dict with a dict for each parameter's name"
        raise TypeError(f"{what}, found {_shown(state)}")
    _check_names(state, "state")
    given = _by_first_name(state, contents)
    quantised = [name for name in aligned if name in given]
    given |= {name: tensors_of(given[name], contents.shape(name)) for name in quantised}
    read = [_read_group(number, group, contents) for number, group in enumerate(groups)]
    counts = Counter(name for _, names in read for name in names)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(f"param_groups name these parameters twice: {', '.join(twice)}")
    return OptimizerContents(read, _read_state(given, contents)), given


def _are_mappings(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _shown(value: Any) -> str:
    return f"a {type(value).__name__} ({value!r:.80})"


def _read_group(number: int, group: Mapping[str, Any], contents: Contents) -> Group:
    what = f"param_groups[{number}]"
    if "params" not in group:
        problem = "has no 'params', which must list the names of its parameters"
        raise ValueError(f"{what} {problem}; it has {list(group)}")
    names = group["params"]
    if not isinstance(names, list | tuple):
        expected = f"the 'params' of {what} must be a list of parameters' names"
        raise TypeError(f"{expected}, found {_shown(names)}")
    _check_names(names, what)
    return options_of(group, what), list(_by_first_name(dict.fromkeys(names), contents))


def _check_names(names: Any, what: str) -> None:
    if strangers := [name for name in names if not isinstance(name, str)]:
        raise ValueError(
            f"{what} has {strangers[:3]} as params; expected parameters' names, as "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict writes them "
            "(optimizer.state_dict() has numbers)"
        )


def _by_first_name(found: Mapping[Any, Any], contents: Contents) -> dict[Any, Any]:
    """Changes keys to first names. A tied parameter may have any of its names.

    Names may have prefixes of torch's wrappers.
    """
    first = {name: names[0] for names in contents.names.values() for name in names}
    return {first.get(own_name(name), own_name(name)): value for name, value in found.items()}


def _read_state(given: StateByName, contents: Contents) -> dict[str, NamedState]:
    shapes = {name: contents.shape(name) for name in given if contents.knows(name)}
    unread = [
        f"{key} of {name} {problem}"
        for name, values in given.items()
        for key, value in values.items()
        if isinstance(value, Tensor) and (problem := unreadable(value)) is not None
    ]
    if unread:
        raise ValueError(f"can't be read: {'; '.join(unread)}")
    return sorted_out(given, shapes, Tensor)


def sorted_out(
    given: StateByName,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Any,
) -> dict[str, NamedState]:
    """Divides each name's state into numbers, tensors of the name's shape, and other tensors.

    `tensors`: the classes of tensors in it.
    """
    each = [(name, key, value) for name, values in given.items() for key, value in values.items()]
    numbers = {"step"}  # keys whose 0-dim tensors are numbers, also for 0-dim parameters
    for name, key, value in each:
        if isinstance(value, tensors) and shapes.get(name) and not len(value.shape):
            numbers.add(key)
    state = {name: NamedState() for name in given}
    for name, key, value in each:
        what = f"{key!r} of {name}"
        if not isinstance(key, str) or ":" in key:
            raise TypeError(f"{what}: a key must be a string without a colon")
        named, own = state[name], shapes.get(name)
        is_number = not isinstance(value, tensors)
        if is_number or (not len(value.shape) and (own or key in numbers)):
            named.scalars[key] = encode_scalar(value, what)
        elif tuple(value.shape) == own:
            named.elements[key] = name_of(value.dtype)
        else:
            named.whole[key] = name_of(value.dtype), list(value.shape)
    return state
