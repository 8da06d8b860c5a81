"""Computes tensors that a model's files leave out, because the model computes them itself:
sinusoidal positions, biases of zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..access import sharded_in
from ..checkpoint.contents import piece_of
from ..checkpoint.meta_buffers import hooks_of, is_written, put, run_hook, twin
from ..core.layer_state import LayerState
from ..core.parameters import parameters_of
from ..modules import plain_modules

__all__: list[str] = []


def may_be_left_out(model: nn.Module, name: str) -> bool:
    """Whether transformers lets files leave out a tensor of this name."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)


def compute(
    model: nn.Module, states: list[LayerState], names: Mapping[int, str], strict: bool
) -> list[tuple[Tensor, Tensor]]:
    """Returns values for the model's tensors without values whose ids are in `names`, on the CPU.
    It changes nothing.

    `_init_weights` of the model around a tensor's module computes them, or else the module's own
    `reset_parameters`. Raises ValueError if the model does not compute one of them, and `strict` is
    set.
    """
    owned = sharded_in(states)
    empty = {key for key, each in owned.items() if each.index in each.chunk.unloaded}
    hooks = hooks_of(model)
    found: dict[int, tuple[Tensor, Tensor]] = {}
    missing: dict[int, str] = {}
    for owner in plain_modules(model):
        for attribute, tensor in [*parameters_of(owner), *owner._buffers.items()]:
            key = id(tensor)
            if tensor is None or key in found or key not in names:
                continue
            if key not in empty and not tensor.is_meta:
                continue
            dtype = owned[key].chunk.shard.dtype if key in owned else tensor.dtype
            copy, before = twin(owner), torch.empty(tensor.shape, dtype=dtype)
            held: dict[str, Any] = copy._buffers if attribute in copy._buffers else copy._parameters
            if held is not copy._buffers:
                before = nn.Parameter(before, requires_grad=False)
            held[attribute] = before
            run_hook(hooks.get(owner), copy)
            if is_written(value := held[attribute], before):
                found[key] = tensor, value.detach().to(dtype)
            else:
                missing[key] = names[key]
    if strict and (left := [name for key, name in missing.items() if key not in found]):
        raise ValueError(
            f"nothing was loaded. missing, and not computed by the model either: {', '.join(left)}"
        )
    return list(found.values())


@torch.no_grad()
def fill(model: nn.Module, states: list[LayerState], computed: list[tuple[Tensor, Tensor]]) -> None:
    """Fills the tensors with rank 0's values, for random ones differ. Every rank calls it."""
    first = states[0]
    owned = sharded_in(states)
    for tensor, value in computed:
        value = value.to(first.device)
        if value.numel():
            first.communicator.broadcast(value)
        sharded = owned.get(id(tensor))
        if sharded is None:
            put(model, tensor, value)
            continue
        if (piece := piece_of(sharded)) is not None:
            own = value.reshape(-1)[piece.start : piece.stop]
            sharded.chunk.shard.data[piece.place].copy_(own)
        sharded.chunk.unloaded.discard(sharded.index)
        torch.autograd.graph.increment_version(sharded.chunk.shard)  # graphs built before are stale
