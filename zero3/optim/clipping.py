"""Gradient clipping by the one global norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..access import states_of
from ..comm.agreement import agree_where_nan
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
        max_norm: 0 or more; `float("inf")` only measures. Ranks that pass different ones are told when they next compare their transfers.
        norm_type: p of the p-norm; `float("inf")` for the largest element.
        error_if_nonfinite: Raise if the norm is nan or inf, and leave the gradients as they are.

    Returns:
        The norm before clipping, 0-dim, float64 if any chunk is, else float32; the same bits on all ranks.

    Raises:
        RuntimeError: The norm is nan or inf, and `error_if_nonfinite` is set; on every rank.
        ValueError: `norm_type` is not positive, or `max_norm` is negative or nan; on every rank (on a GPU the others get nan). Nothing
            in `model` is sharded.
        TypeError: One of the two is no number; on every rank.

    Example::

        loss_of(model, batch).backward()
        norm = zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
    """
    states = states_of(model)
    norm_type, error = _checked(norm_type, max_norm)
    chunks = [part.parameter for state in states for chunk in state.chunks for part in chunk.parts]
    states[0].log.look(wait=False)
    reduce_deferred(chunk.grad for chunk in chunks)
    filled = [gradient for gradient in gradients_to_measure(model, states) if gradient.numel()]
    maximum = math.isinf(norm_type)
    local = torch.zeros((), dtype=torch.float64, device=states[0].device)
    if error is not None:
        local = local + math.nan
    elif filled:
        local = torch.nn.utils.get_total_norm(filled, norm_type).to(torch.float64)
    total = local if maximum else local**norm_type
    communicator = states[0].communicator
    with NamingFailures(communicator, "summing up", Subject("the norm of the gradients")):
        if maximum:
            # As integers the bits of positive numbers keep their order, with nan on top: a maximum of floats may lose it.
            communicator.all_reduce(total.abs_().view(torch.int64), maximum=True)
        else:
            communicator.all_reduce(total)  # [S1]
    agree_where_nan(communicator, states[0].device, "clip_grad_norm_", total, error)
    limit = float(max_norm)  # ranks that scale by different ones are told when they compare their transfers
    states[0].log.note("clipping", f"the gradients to max_norm={limit} of norm {norm_type}", norm_type, limit)
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


def _checked(norm_type: float, max_norm: float) -> tuple[float, Exception | None]:
    """The order of the norm, by which a rank takes part in the sum even if it has found a mistake."""
    try:
        order = float(norm_type)
        if order > 0 and max_norm >= 0:  # below 0 torch would turn all gradients around
            return order, None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return 2.0, TypeError(f"norm_type and max_norm must be numbers, found {norm_type!r} and {max_norm!r}")
    known = order if math.isinf(order) else 2.0
    return known, ValueError(f"norm_type must be positive and max_norm at least 0, found {order} and {max_norm}")
