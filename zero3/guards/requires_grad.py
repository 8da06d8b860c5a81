"""Finds changes of one parameter's `requires_grad`. They can't count, because a chunk is trained or
frozen as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..core.layer_state import LayerState
from ..core.parameters import named

__all__: list[str] = []


def check_requires_grad(computing: LayerState, layers: Iterable[LayerState]) -> None:
    """Compares `requires_grad` of a layer's parameters with their chunks', before a forward with
    gradients.

    It does not look earlier, because tools switch adapters off and on again. If no parameter of the
    model (`layers`) needs a gradient, as inside peft's disable_adapter(), no gradient can be wrong.

    Raises:
        RuntimeError: The `requires_grad` of a parameter of `computing` differs from its chunk's.
    """
    if not torch.is_grad_enabled():
        return
    changed = [
        sharded
        for sharded in computing.parameters
        if sharded.sites.parameter.requires_grad != sharded.chunk.trains
    ]
    computing.toggled = bool(changed)
    if not changed or not any(
        sharded.sites.parameter.requires_grad for state in layers for sharded in state.parameters
    ):
        return
    names = named(
        [
            f"{sharded.sites.name!r} ({'frozen' if sharded.chunk.trains else 'trained'} now)"
            for sharded in changed
        ]
    )
    raise RuntimeError(
        f"rank {computing.communicator.rank}: layer {computing.label} was to compute with "
        f"gradients, but requires_grad was changed of {names}. A chunk is trained or frozen as a "
        "whole. Set requires_grad back before a forward with gradients (peft: leave "
        "disable_adapter(), or set_adapter() the adapter that trains), compute under "
        "torch.no_grad(), choose what trains with zero3.set_trainable(model, select) between two "
        "steps, or use requires_grad_ of the whole chunk (for chunk in layer.parameters(): ...)."
    )
