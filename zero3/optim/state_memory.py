"""Where an optimizer's state for a parameter is to lie, if it is not where the parameter is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..core.marks import StaysBehind

__all__: list[str] = []

_ATTRIBUTE = "zero3_state_memory"  # of a parameter

Place = Callable[[int, torch.dtype], Tensor | None]


class _StateMemory(StaysBehind):
    def __init__(self, place: Place) -> None:
        self.place = place


def set_state_memory(parameter: nn.Parameter, place: Place) -> None:
    """From now on `place` gives the memory of state that is loaded: 1-D, of so many elements. Or None, if there is none left."""
    setattr(parameter, _ATTRIBUTE, _StateMemory(place))


def is_stepped_in_turns(parameter: Tensor) -> bool:
    """Whether it is one of an optimizer that steps chunk by chunk."""
    return isinstance(getattr(parameter, _ATTRIBUTE, None), _StateMemory)


def empty_state(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the parameter's shape with any values, for loaded state."""
    memory = getattr(parameter, _ATTRIBUTE, None)
    found = memory.place(parameter.numel(), dtype) if isinstance(memory, _StateMemory) else None
    return torch.empty(parameter.shape, dtype=dtype, device=parameter.device) if found is None else found.view(parameter.shape)
