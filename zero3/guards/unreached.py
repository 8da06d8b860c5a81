"""An optimizer's step, as if the elements that no gradient has reached were not there: parameters
share chunks, and an optimizer treats all elements of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.chunk import Chunk, Part
from ..core.layer_state import LayerState
from ..core.reached import reached_by

__all__: list[str] = []

Spans = dict[int, list[slice]]  # by id of a parameter


def spans_unreached(states: Iterable[LayerState]) -> Spans:
    """The elements of the layers' chunks and parts that no gradient has reached, where it has
    reached others.
    """
    return {
        id(part.parameter): spans
        for state in states
        for chunk, account in state.gradients.accounts.items()
        # in a step inside of backward nothing is settled
        if account.unreached.slots or account.unreached.landed is not None
        for part in chunk.parts
        if (spans := _of(chunk, part))
    }


def _of(chunk: Chunk, part: Part) -> list[slice]:
    if (reached := reached_by(part.parameter.grad)) is None:
        return []
    missing = {chunk.layout.slots[number] for number in part.slots - reached.slots()}
    found: list[slice] = []
    for piece in chunk.pieces:
        if piece.slot in missing and part.start <= piece.offset < part.stop:
            start, stop = piece.place.start - part.start, piece.place.stop - part.start
            if found and found[-1].stop == start:
                start = found.pop().start
            found.append(slice(start, stop))
    return found


class LeftAlone:
    """Elements of an optimizer's parameters, and of its state of them, that are after a step as
    before it. For optimizers that treat each element by itself.

    A gradient that is not zero there is none of ours: a penalty over chunks has reached them. Then
    they are stepped.
    """

    def __init__(self) -> None:
        self._aside: list[tuple[nn.Parameter, slice, Tensor, dict[Any, Tensor]]] = []

    @torch.no_grad()
    def put_aside(self, optimizer: torch.optim.Optimizer, spans: Spans) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                for span in spans.get(id(parameter), ()):
                    untouched = ~parameter.grad.as_subclass(Tensor)[span].any()
                    tensors = _tensors(optimizer, parameter)
                    before = {key: each[..., span].clone() for key, each in tensors}
                    if not group.get("weight_decay"):
                        before[_STILL] = before[_VALUES]
                    self._aside.append((parameter, span, untouched, before))

    @torch.no_grad()
    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        aside, self._aside = self._aside, []
        for parameter, span, untouched, before in aside:
            for key, tensor in _tensors(optimizer, parameter):
                new = tensor[..., span]
                if key in before:
                    old = before[key]
                elif _STILL in before:
                    continue  # without decay it is as the optimizer makes it
                else:
                    old = _as_made(new, before[_VALUES])
                new.copy_(torch.where(untouched.to(new.device), old, new))


@contextmanager
def left_alone(optimizer: torch.optim.Optimizer, states: Iterable[LayerState]) -> Iterator[None]:
    """Context around a step."""
    left = LeftAlone()
    left.put_aside(optimizer, spans_unreached(states))
    try:
        yield
    finally:
        left.put_back(optimizer)


def _tensors(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> list[tuple[Any, Tensor]]:
    """A parameter's values, and what the optimizer keeps for each of its elements."""
    kept = optimizer.state.get(parameter, {})
    state = [(key, each) for key, each in kept.items() if isinstance(each, Tensor)]
    # of several rows, perhaps, as some optimizers stack their moments
    alike = [(key, each) for key, each in state if each.shape[-1:] == parameter.shape]
    return [(_VALUES, parameter.data), *alike]


_VALUES, _STILL = object(), object()  # in place of a key


def _as_made(new: Tensor, values: Tensor) -> Tensor:
    """What an optimizer begins with, of state that this step has made, and that only decay can
    have changed: a copy of the values, as for an average of them, or 0.
    """
    values = values.to(new.device)
    is_copy = (new - values).abs() < new.abs()
    return torch.where(is_copy, values.to(new.dtype), 0)
