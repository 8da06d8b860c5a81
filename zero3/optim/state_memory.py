"""What an optimizer that steps chunk by chunk has told about a parameter: where its state is to
lie, and when the step is written.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..core.layer_state import LayerState, parts_of
from ..guards.marks import StateMemory

__all__: list[str] = []


def set_state_memory(parameter: nn.Parameter, memory: StateMemory) -> None:
    """Tells where loaded state of a chunk, or of a part of one, is to lie."""
    parameter.zero3_state_memory = memory  # type: ignore[attr-defined]


def _memory_of(parameter: Tensor) -> StateMemory | None:
    found = getattr(parameter, "zero3_state_memory", None)
    return found if isinstance(found, StateMemory) else None


def land_steps(states: Iterable[LayerState]) -> None:
    """Returns when nothing that optimizers' steps have made of the layers is still on its way to a
    disk.

    Raises:
        OSError: Some of it could not be written, now or earlier. Other ranks don't know of it.
    """
    memories = map(_memory_of, parts_of(states))
    for land in dict.fromkeys(memory.land for memory in memories if memory):
        land()


def is_stepped_in_turns(parameter: Tensor) -> bool:
    """Whether it is one of an optimizer that steps chunk by chunk."""
    return _memory_of(parameter) is not None


def empty_state(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the parameter's shape with any values, for loaded state."""
    memory = _memory_of(parameter)
    if memory is None or (found := memory.place(parameter.numel(), dtype)) is None:
        return torch.empty(parameter.shape, dtype=dtype, device=parameter.device)
    return found.view(parameter.shape)
