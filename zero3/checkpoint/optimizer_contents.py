"""An optimizer's state by the names of the unwrapped model's parameters. The optimizer's own parameters may be any slices of them.

A state tensor with the shape of the optimizer's parameter has an element for each of its elements, and is cut as the parameter is. A
number, or a 0-dim tensor (`step`), counts for every name in the parameter. A tensor of another shape (Adafactor's rows and columns)
needs a parameter that is whole on one rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from ..comm.agreement import agreeing, exchange_texts
from ..comm.plain_values import encode_scalar, name_of
from ..core.chunk import Chunk, Part
from ..core.parameters import own_name
from ..optim.several import Together
from .contents import Contents, Span

__all__: list[str] = []

_NOT_OPTIONS = ("params", "param_names", "whole")  # `whole` tells how this run divides the model, and another may divide it otherwise


class Held(NamedTuple):
    """One of the optimizer's parameters, and the spans of the model that it covers. Padding has no spans."""

    parameter: Tensor
    group: int
    spans: tuple[Span, ...]
    mine: bool  # whether this rank's replica saves it here; a parameter that every rank holds whole is saved by rank 0

    @property
    def filled(self) -> tuple[Span, ...]:
        """The spans without those of empty parameters, or all spans if all are empty."""
        return tuple(span for span in self.spans if span.start < span.stop) or self.spans


@dataclass
class NamedState:
    """Describes the state of one name, without the values of tensors."""

    elements: dict[str, str] = field(default_factory=dict)  # key: dtype, of tensors in the parameter's shape
    scalars: dict[str, Any] = field(default_factory=dict)  # key: value, as `encode_scalar` writes it
    whole: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # key: dtype and shape, of tensors in other shapes

    @property
    def keys(self) -> list[str]:
        return sorted([*self.elements, *self.scalars, *self.whole])


@dataclass
class OptimizerContents:
    """Describes an optimizer's groups, and its state by name on all ranks. It is the same on every rank."""

    groups: list[tuple[dict[str, Any], list[str]]]  # options, as `encode_scalar` writes them, and the names in the model's order
    state: dict[str, NamedState]
    kinds: list[str] = field(default_factory=list)  # of each group: its optimizer's class, where it is known

    def to_json(self) -> dict[str, Any]:
        alike: dict[str, list[str]] = {}
        for name, named in self.state.items():
            alike.setdefault(json.dumps([named.elements, named.scalars, named.whole]), []).append(name)
        return {"groups": self.groups, "classes": self.kinds, "state": [[names, *json.loads(text)] for text, names in alike.items()]}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> OptimizerContents:
        groups = [(dict(options), list(map(own_name, names))) for options, names in found["groups"]]
        return cls(groups, named_states(found["state"]), list(found.get("classes", [])))


def held_by(optimizer: Together, contents: Contents) -> list[Held]:
    """Returns the optimizer's parameters in their order, with the spans that each covers.

    Raises:
        TypeError: An option could only be pickled.
        ValueError: A parameter is not of this model.
    """
    known: dict[int, tuple[tuple[Span, ...], bool]] = {}
    for name, tensor in contents.others.items():
        known[id(tensor)] = ((Span(name, 0, tensor.numel(), 0),), contents.is_first)
    for chunk in contents.chunks():
        known |= {id(part.parameter): (tuple(_covered(part, chunk, contents)), True) for part in chunk.parts}
    held = []
    for group, options in enumerate(optimizer.param_groups):
        options_of(options, optimizer.labels[group])  # raises for values that could only be pickled
        for parameter in options["params"]:
            if id(parameter) not in known and parameter.numel():  # a group that is empty on this rank holds an empty parameter
                raise ValueError(
                    f"{optimizer.labels[group]} has a parameter {tuple(parameter.shape)} that is not of this model. "
                    "Make the optimizer from get_trainable_chunk(model) or param_groups(model, ...), after sharding."
                )
            held.append(Held(parameter, group, *known.get(id(parameter), ((), True))))
    return held


def _covered(part: Part, chunk: Chunk, contents: Contents) -> list[Span]:
    if part.parameter is chunk.shard:
        return contents.spans(chunk)
    if part.start == part.stop:  # an empty parameter, or the placeholder of a rank that holds nothing
        empties = zip([other for other in chunk.parts if other.start == other.stop], contents.empties(chunk), strict=False)
        return [span for other, span in empties if other is part and span is not None and chunk.is_first_holder]
    inside = [span for span in contents.spans(chunk) if span.start < span.stop and part.start <= span.offset < part.stop]
    return [span._replace(offset=span.offset - part.start) for span in inside]


def state_of(optimizer: Together, held: Held, contents: Contents) -> NamedState:
    """Describes the optimizer's state of one of its parameters.

    Raises:
        TypeError: A value is neither a number nor a tensor, or is a tensor of another shape although the parameter is not whole.
    """
    found = NamedState()
    for key, value in optimizer.state.get(held.parameter, {}).items():
        what = f"{optimizer.kinds[held.group]}'s {key!r} of {held.spans[0].name if held.spans else 'padding'}"
        if not isinstance(key, str) or ":" in key:
            raise TypeError(f"{what}: a key must be a string without a colon")
        if not isinstance(value, Tensor) or (value.dim() == 0 and held.parameter.dim()) or (key == "step" and value.dim() == 0):
            found.scalars[key] = encode_scalar(value, what)
        elif value.shape == held.parameter.shape:
            found.elements[key] = name_of(value.dtype)
        elif not held.spans or is_whole(held, contents):
            found.whole[key] = name_of(value.dtype), list(value.shape)
        else:
            raise TypeError(
                f"{what} is a tensor {tuple(value.shape)} for flat slices {tuple(held.parameter.shape)} of parameters: it belongs to "
                "none of them. Give the optimizer whole parameters (param_groups with whole=True)."
            )
    return found


def is_whole(held: Held, contents: Contents) -> bool:
    """Whether the optimizer's parameter is exactly one parameter of the model, in its own shape."""
    return len(held.filled) == 1 and tuple(held.parameter.shape) == contents.shape(held.filled[0].name)


def contents_of(optimizer: Together, held: list[Held], contents: Contents, *, with_state: bool = True) -> OptimizerContents:
    """Puts together what every rank knows of its own spans. Every rank calls it."""
    groups: list[list[str]] = [[] for _ in optimizer.param_groups]
    state: list[Any] = []
    kept: list[NamedState] = []  # one for each of `held`
    with agreeing(contents.communicator, contents.device, "the optimizer's groups") as lines:
        options = [options_of(group, optimizer.labels[number]) for number, group in enumerate(optimizer.param_groups)]
        lines += [json.dumps(own, sort_keys=True) for own in options]
        for one in held:
            names = [
                span.name for span in one.spans if span.start == 0 and one.mine and contents.writes
            ]  # only the rank where a parameter begins
            groups[one.group] += names
            found = state_of(optimizer, one, contents) if with_state else NamedState()
            kept.append(found)
            names = [name for name in names if not found.whole or name == one.filled[0].name]
            if names and (found.elements or found.scalars or found.whole):
                state.append([names, found.elements, found.scalars, found.whole])
    texts = exchange_texts(contents.communicator, contents.device, json.dumps([groups, state]))
    merged = OptimizerContents([(o, []) for o in options], {}, optimizer.kinds)
    order = {names[0]: place for place, names in enumerate(contents.names.values())}
    for text in texts:
        their_groups, their_state = json.loads(text)
        for (_, names), more in zip(merged.groups, their_groups, strict=True):
            names += more
        merged.state |= named_states(their_state)
    for _, names in merged.groups:
        names.sort(key=order.__getitem__)
    merged.state = dict(sorted(merged.state.items(), key=lambda item: order[item[0]]))
    if with_state:
        _check_even(held, kept, contents, merged)
    return merged


def _check_even(held: list[Held], kept: list[NamedState], contents: Contents, merged: OptimizerContents) -> None:
    """Checks that every rank keeps the same keys for its slice of a parameter as the rank where the parameter begins.

    Raises:
        ValueError: A rank has made no step, or another kind of step. Every rank raises it.
    """
    with agreeing(contents.communicator, contents.device, "the optimizer's state"):
        for one, own in zip(held, kept, strict=True):
            for span in one.filled if one.mine else ():
                first = merged.state.get(span.name, NamedState())
                if own.keys != first.keys:
                    raise ValueError(
                        f"the optimizer keeps {own.keys or 'nothing'} for this rank's slice of {span.name}, and "
                        f"{first.keys or 'nothing'} where that begins: all ranks must make the same steps"
                    )


def named_states(listed: Iterable[Any]) -> dict[str, NamedState]:
    """Makes a state for each name of `listed`, whose items are `[names, elements, scalars, whole]`."""
    return {
        own_name(name): NamedState(dict(elements), dict(scalars), {key: (dtype, shape) for key, (dtype, shape) in whole.items()})
        for names, elements, scalars, whole in listed
        for name in names
    }


def options_of(group: dict[str, Any], what: str) -> dict[str, Any]:
    """Returns a group's options, without its parameters, as JSON can hold them."""
    return {key: encode_scalar(value, f"{key!r} of {what}") for key, value in group.items() if key not in _NOT_OPTIONS}
