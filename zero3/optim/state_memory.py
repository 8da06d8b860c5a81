"""What an optimizer that steps chunk by chunk has told about a parameter: where its state is to
lie, and when the step is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..core.layer_state import LayerState
from ..guards.marks import StaysBehind

__all__: list[str] = []

_ATTRIBUTE = "zero3_state_memory"  # of a parameter

Place = Callable[[int, torch.dtype], Tensor | None]
Land = Callable[[], None]


class _StateMemory(StaysBehind):
    def __init__(self, place: Place, land: Land) -> None:
        self.place, self.land = place, land


def set_state_memory(parameter: nn.Parameter, place: Place, land: Land) -> None:
    """Tells where loaded state is to lie, and how to wait for what steps have changed.

    Args:
        parameter: A chunk, or a part of one.
        place: Gives memory, 1-D, of so many elements. Or None, if there is none left.
        land: Returns when nothing is still to be written to a disk, or raises OSError.
    """
    setattr(parameter, _ATTRIBUTE, _StateMemory(place, land))


def land_steps(states: Iterable[LayerState]) -> None:
    """Returns when nothing that optimizers' steps have made of the layers is still on its way to a
    disk.

    Raises:
        OSError: Some of it could not be written, now or earlier. Other ranks don't know of it.
    """
    parameters = (
        part.parameter for state in states for chunk in state.chunks for part in chunk.parts
    )
    found = (getattr(parameter, _ATTRIBUTE, None) for parameter in parameters)
    for land in dict.fromkeys(memory.land for memory in found if isinstance(memory, _StateMemory)):
        land()


def is_stepped_in_turns(parameter: Tensor) -> bool:
    """Whether it is one of an optimizer that steps chunk by chunk."""
    return isinstance(getattr(parameter, _ATTRIBUTE, None), _StateMemory)


def empty_state(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the parameter's shape with any values, for loaded state."""
    memory = getattr(parameter, _ATTRIBUTE, None)
    found = memory.place(parameter.numel(), dtype) if isinstance(memory, _StateMemory) else None
    return (
        torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
        if found is None
        else found.view(parameter.shape)
    )
