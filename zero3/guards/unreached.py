"""An optimizer's step, as if the elements that no gradient has reached were not there: parameters
share chunks, and an optimizer treats all elements of a chunk.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.chunk import Chunk, Part
from ..core.layer_state import LayerState

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
        if account.unreached.maybe
        for part in chunk.parts
        if (spans := _of(chunk, part, account.unreached.slots))
    }


def _of(chunk: Chunk, part: Part, unreached: frozenset[int]) -> list[slice]:
    missing = {chunk.layout.slots[number] for number in part.slots & unreached}
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
        self.aside: list[tuple[dict[str, Any], nn.Parameter, slice, Tensor, dict[Any, Tensor]]] = []

    @torch.no_grad()
    def put_aside(self, optimizer: torch.optim.Optimizer, spans: Spans) -> None:
        self.aside = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                for span in spans.get(id(parameter), ()):
                    untouched = ~parameter.grad.as_subclass(Tensor)[span].any()
                    tensors = _tensors(optimizer, parameter)
                    before = {key: each[..., span].clone() for key, each in tensors}
                    self.aside.append((group, parameter, span, untouched, before))

    @torch.no_grad()
    def put_back(self, optimizer: torch.optim.Optimizer) -> None:
        aside, self.aside = self.aside, []
        for group, parameter, span, untouched, before in aside:
            tensors = _tensors(optimizer, parameter)
            if any(key not in before for key, _ in tensors):
                before = {**state_begun(optimizer, group, before[_VALUES]), **before}
            for key, tensor in tensors:
                new = tensor[..., span]
                old = before.get(key, new.new_zeros(()))
                new.copy_(torch.where(untouched.to(new.device), old.to(new.device), new))


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


_VALUES = object()  # in place of a key


@torch.no_grad()
def state_begun(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], values: Tensor
) -> dict[Any, Tensor]:
    """The state that an optimizer begins with for a parameter of these values, as far as it is as
    long: after a step without a gradient, and without decay.
    """
    parameter = nn.Parameter(values.detach().clone())
    parameter.grad = torch.zeros_like(parameter)
    alike = {key: value for key, value in vars(optimizer).items() if key != "step"}
    alike |= {key: OrderedDict() for key in alike if key.startswith("_optimizer_")}  # hooks
    options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    still = {"weight_decay": 0.0} if "weight_decay" in options else {}
    alike["param_groups"] = [{"params": [parameter], **options, **still}]
    alike["state"] = defaultdict(dict)
    try:
        twin = object.__new__(type(optimizer))
        twin.__setstate__(alike)
        twin.step()
    except Exception:  # of any kind, since the optimizer may be of any library
        return {}
    # a copy of the values is one of those that decay by another name (ASGD's) has not changed
    return {
        key: torch.where(each == parameter, values.to(each.dtype), each)
        for key, each in _tensors(twin, parameter)
        if key is not _VALUES
    }
