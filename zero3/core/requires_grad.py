"""What becomes of a change of `requires_grad` of one parameter, when its whole chunk is trained or frozen."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .layer_state import LayerState
from .parameters import named

__all__: list[str] = []


def check_requires_grad(computing: LayerState, layers: Iterable[LayerState]) -> None:
    """Before a forward with gradients: a gradient of a parameter that is frozen and whose chunk is not, or vice versa, would be wrong.

    A change is remembered until then, for tools switch adapters off and on again. Where nothing of the model (`layers`) is to be
    trained, as inside peft's disable_adapter(), no gradient is lost.

    Raises:
        RuntimeError: a parameter of `computing` has another `requires_grad` than its chunk.
    """
    if not torch.is_grad_enabled():
        return
    changed = [sharded for sharded in computing.parameters if sharded.sites.parameter.requires_grad != sharded.chunk.trains]
    computing.toggled = bool(changed)
    if not changed or not any(sharded.sites.parameter.requires_grad for state in layers for sharded in state.parameters):
        return
    names = named([f"{sharded.sites.name!r} ({'frozen' if sharded.chunk.trains else 'trained'} now)" for sharded in changed])
    raise RuntimeError(
        f"rank {computing.communicator.rank}: layer {computing.label} was to compute with gradients, but requires_grad was changed of "
        f"{names}. A chunk is trained or frozen as a whole. Set requires_grad back before a forward with gradients (peft: leave "
        "disable_adapter(), or set_adapter() the adapter that trains), compute under torch.no_grad(), choose what trains with "
        "zero3.set_trainable(model, select) between two steps, or use requires_grad_ of the whole chunk (for chunk in "
        "layer.parameters(): ...)."
    )
