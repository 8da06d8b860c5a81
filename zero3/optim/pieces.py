"""Divides a chunk into parts: parameters that share the chunk's memory and replace it in
optimizers.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from ..core.chunk import Chunk, Part
from ..core.layer_state import LayerState
from ..core.layout import Slot
from ..core.released import ReleasedParameter
from ..core.sites import become
from ..guards.marks import Owner, mark

__all__: list[str] = []


_GRAD: Any = torch.Tensor.grad  # the descriptor


class Superseded(nn.Parameter):
    """A chunk that parts have replaced, or a part of an earlier division. It is made only by
    switching a parameter's class.

    An optimizer that still holds it gets an error. Otherwise it would find no gradient, and would
    silently train nothing.
    """

    zero3_name: str

    def _raise(self, *_: object) -> NoReturn:
        raise RuntimeError(
            f"{self.zero3_name} is no parameter of the model any more: zero3.param_groups or "
            "zero3.set_trainable has put others in its place. Make the optimizer from what "
            "param_groups returned, or from zero3.get_trainable_chunk(model), after their last "
            "call"
        )

    grad = property(_raise, _raise)


class _Placeholder(nn.Parameter):
    """Stands in a group of which this rank has no part. It never has a gradient, and raises once
    others have replaced the ranks' parts.
    """

    zero3_beside: Owner  # a part of the same division

    @property
    def grad(self) -> torch.Tensor | None:
        beside = vars(self).get("zero3_beside")  # a copy has none
        if beside is not None and isinstance(beside(), Superseded | None):
            supersede(self, "what stands for other ranks' parts of chunks")
            return self.grad  # raises
        found: torch.Tensor | None = _GRAD.__get__(self)
        return found

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        _GRAD.__set__(self, gradient)


def trains(chunk: Chunk, name: str) -> bool:
    """Whether one of the chunk's parameters trains. `name`: of its slot."""
    return chunk.shard.requires_grad and name not in chunk.parts.left_out


def supersede(parameter: nn.Parameter, name: str) -> None:
    if not isinstance(parameter, Superseded):
        parameter.grad = None
        parameter.zero3_name = name  # type: ignore[attr-defined]
        become(parameter, Superseded)


def retire(chunk: Chunk, label: str) -> None:
    """Frees the memory of a chunk and its parts, which others have replaced. Using them raises."""
    for parameter in [chunk.shard, *(part.parameter for part in chunk.parts)]:
        supersede(parameter, f"a chunk of layer {label}")
        parameter.data = parameter.data.new_empty(0)


def renew(state: LayerState, chunk: Chunk) -> None:
    """Puts new parameters with the same values in the chunk's place. Optimizers of before raise."""
    old = chunk.renew()
    _install(state, chunk, [chunk.undivided], frozenset())
    supersede(old, f"a chunk of layer {state.label}")


class Choice(NamedTuple):
    """The decision of `options` for one parameter."""

    group: int | None  # the group's number; None: in no group
    whole: bool = False
    align: int = 0  # it is cut at multiples of this alone; 0: anywhere

    @property
    def merges(self) -> bool:
        """Whether neighbours of the same choice are one part."""
        return not self.whole and not self.align


Choices = dict[tuple[LayerState, str], Choice]  # by layer and slot


def divide(state: LayerState, chunk: Chunk, chosen: Choices) -> list[tuple[int, nn.Parameter]]:
    """Sets the chunk's parts, and returns those that have a group, with the group's number.

    Neighbours in one group are one part, unless they are aligned. An empty parameter is a part by
    itself. If all slots of the chunk, on all ranks, are in one group, the only part is the chunk.
    """
    choices = {slot: chosen[state, slot.name] for slot in chunk.layout.slots}
    kinds = set(choices.values())
    left_out = frozenset(slot.name for slot, choice in choices.items() if choice.group is None)
    with torch.inference_mode(False):
        if len(kinds) == 1 and (only := kinds.pop()).group is not None and only.merges:
            parts = [chunk.undivided]
            numbered = [(only.group, chunk.shard)]
        else:
            parts, numbered = _parts_of(chunk, choices)
    _install(state, chunk, parts, left_out)
    return numbered


def _parts_of(
    chunk: Chunk, choices: dict[Slot, Choice]
) -> tuple[list[Part], list[tuple[int, nn.Parameter]]]:
    spans: list[tuple[int, int, Slot | None, tuple[int, ...]]] = []
    for piece in chunk.pieces:
        start, stop, choice = piece.place.start, piece.place.stop, choices[piece.slot]
        before = spans[-1][2] if spans else None
        if before is not None and choice.merges and choices[before] == choice:
            start = spans.pop()[0]
        whole = chunk.at.layout.slots[0].shape if chunk.in_part else piece.slot.shape
        spans.append((start, stop, piece.slot, whole if choice.whole else (stop - start,)))
    # empty parameters: no piece has them, but an optimizer keeps state for them
    if chunk.is_first_holder:
        spans += [(0, 0, slot, slot.shape) for slot in chunk.layout.slots if not slot.numel]
    together = _together(choices)
    # shares the version counter, so that a step on a part counts as a change of the chunk
    flat = chunk.shard.detach()
    parts, numbered = [], []
    for start, stop, slot, shape in spans or [(0, 0, None, (0,))]:
        choice = Choice(None) if slot is None else choices[slot]
        parameter = nn.Parameter(
            flat[start:stop].view(shape), requires_grad=choice.group is not None
        )
        numbers = frozenset() if slot is None else together[slot]
        parts.append(Part(parameter, start, stop, choice.whole, numbers))
        if choice.group is not None:
            numbered.append((choice.group, parameter))
    return parts, numbered


def _together(choices: dict[Slot, Choice]) -> dict[Slot, frozenset[int]]:
    """For each slot the numbers of those in the same part: the same on all ranks."""
    numbers = {slot: number for number, slot in enumerate(choices)}
    found = {slot: frozenset([number]) for slot, number in numbers.items()}
    for choice, slots in groupby((s for s in choices if s.numel), key=choices.__getitem__):
        if choice.merges:
            run = list(slots)
            found |= dict.fromkeys(run, frozenset(numbers[slot] for slot in run))
    return found


def _install(state: LayerState, chunk: Chunk, parts: list[Part], left_out: frozenset[str]) -> None:
    state.chunks.unlist()
    for old in chunk.parts:
        if old.parameter is not chunk.shard:
            supersede(old.parameter, f"a part of a chunk of layer {state.label}")
            old.parameter.data = old.parameter.data.new_empty(0)
    if parts[0].parameter is chunk.shard:
        become(chunk.shard, nn.Parameter)
    else:
        supersede(chunk.shard, f"a chunk of layer {state.label}")
    chunk.parts.cut(parts, left_out)
    for part in parts:
        mark(part.parameter, state).grad_dtype = chunk.shard.grad_dtype
    state.chunks.list_in()


def placeholder(
    state: LayerState,
    like: ReleasedParameter | nn.Parameter,
    *,
    whole: bool,
    beside: nn.Parameter,
) -> nn.Parameter:
    """Makes an empty parameter for a group without parts on this rank. It leads to the ranks that
    have parts, and never has a gradient. `beside`: a part that is replaced when theirs are.
    """
    shape = (0,) * (max(1, like.ndim) if whole else 1)
    made = _Placeholder(torch.empty(shape, dtype=like.dtype, device=state.device))
    made.zero3_beside = Owner(beside)
    return mark(made, state)
