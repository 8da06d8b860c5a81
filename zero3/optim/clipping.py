"""Gradient clipping by the one global norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..access import states_of
from ..comm.errors import NamingFailures, Subject
from ..core.gradient_types import reduce_deferred
from .norms import gradients_to_measure

__all__: list[str] = []


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
    """Scales all gradients so that their norm, over all parameters of all ranks as one vector, is at most `max_norm`.

    It does what `torch.nn.utils.clip_grad_norm_` does for the unsharded model, in one all-reduce of one number. Every rank calls
    it, after the last backward of a step.

    Args:
        model: Any model that contains zero3 layers.
        max_norm: 0 or more; `float("inf")` only measures.
        norm_type: p of the p-norm; `float("inf")` for the largest element.
        error_if_nonfinite: Raise if the norm is nan or inf, and leave the gradients as they are.

    Returns:
        The norm before clipping, 0-dim, float64 if any chunk is, else float32; the same bits on all ranks.

    Raises:
        RuntimeError: The norm is nan or inf, and `error_if_nonfinite` is set; on every rank.
        ValueError: Nothing in `model` is sharded, `norm_type` is not positive, or `max_norm` is negative or nan.

    Example::

        loss_of(model, batch).backward()
        norm = zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
    """
    norm_type = float(norm_type)
    if not (norm_type > 0 and max_norm >= 0):  # below 0 torch would turn all gradients around
        raise ValueError(f"norm_type must be positive and max_norm at least 0, found {norm_type} and {max_norm}")
    states = states_of(model)
    chunks = [part.parameter for state in states for chunk in state.chunks for part in chunk.parts]
    reduce_deferred(chunk.grad for chunk in chunks)
    filled = [gradient for gradient in gradients_to_measure(model, states) if gradient.numel()]
    maximum = math.isinf(norm_type)
    local = torch.zeros((), dtype=torch.float64, device=states[0].device)
    if filled:
        local = torch.nn.utils.get_total_norm(filled, norm_type).to(torch.float64)
    total = local if maximum else local**norm_type
    communicator = states[0].communicator
    with NamingFailures(communicator, "summing up", Subject("the norm of the gradients")):
        if maximum:
            # As integers the bits of positive numbers keep their order, with nan on top: a maximum of floats may lose it.
            communicator.all_reduce(total.abs_().view(torch.int64), maximum=True)
        else:
            communicator.all_reduce(total)  # [S1]
    if not maximum:
        total = total ** (1.0 / norm_type) if communicator.world_size > 1 else local
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they can't be clipped. "
            "Set error_if_nonfinite=False to scale by it anyway."
        )
    total = total.to(torch.float64 if any(chunk.dtype == torch.float64 for chunk in chunks) else torch.float32)
    torch.nn.utils.clip_grads_with_norm_(chunks, max_norm, total)
    return total
