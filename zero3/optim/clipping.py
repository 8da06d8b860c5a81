"""clip_grad_norm_(): scales gradients by the norm over all parameters of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..access import used_in_step, used_together
from ..comm.streams import on_device
from ..core.chunk_gradient import reduce_deferred
from ..core.layer_state import LayerState, ignored_of, parts_of
from .gradients_in_files import gradients_in_files, norms_in_files, scale_in_files
from .norms import gradients_to_measure, ignored_gradients, ignored_in, over_ranks

__all__: list[str] = []


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scales all gradients so that their norm, over all parameters of all ranks as one vector, is
    at most `max_norm`.

    It does what `torch.nn.utils.clip_grad_norm_` does for the unsharded model, with one all-reduce
    of one number. Every rank calls it, after the last backward of a step. Ranks whose arguments
    differ are told when they next compare their transfers.

    Parameters that the policy's `ignored` leaves alone count too, by the mean of the ranks'
    gradients (the sum, if that is the policy's `gradient_reduction`), for which it makes one more
    all-reduce. Each rank scales its own. So a mean may be made equal on all ranks before or after
    clipping, and a sum after it.

    Args:
        model: Any model that contains zero3 layers.
        max_norm: The largest norm that remains, 0 or more. With `float("inf")` nothing is scaled.
        norm_type: p of the p-norm; `float("inf")` for the largest element.
        error_if_nonfinite: Raise if the norm is nan or inf, and do not scale.

    Returns:
        The norm before clipping, 0-dim, with the same bits on all ranks. It is float64 if any chunk
        is float64, else float32.

    Raises:
        RuntimeError: The norm is nan or inf, and `error_if_nonfinite` is set. Every rank raises it.
        ValueError: Nothing in `model` is sharded, `norm_type` is not positive, or `max_norm` is
            negative or nan. Every rank raises it; on a GPU, ranks with right arguments get nan
            instead.
        TypeError: `norm_type` or `max_norm` is no number. The same ranks raise it.
        OSError: A gradient in a file can't be read (`offload`). The same ranks raise it.

    Example::

        loss_of(model, batch).backward()
        norm = zero3.clip_grad_norm_(model, 1.0)
        optimizer.step()
    """
    states = used_in_step(model, "clip_grad_norm_", whole=True)
    norm_type, error = _checked(norm_type, max_norm)
    chunks = parts_of(states)
    states[0].log.look(wait=False)
    reduce_deferred(chunk.grad for chunk in chunks)
    in_files = gradients_in_files(states)
    filled = list[Tensor]()
    ignored = ignored_gradients(states, ignored_in(model, states), "clip_grad_norm_")
    try:
        norms = norms_in_files(in_files, norm_type)
        filled += (
            each for each in gradients_to_measure(model, states, norms, ignored) if each.numel()
        )
    except OSError as unreadable:
        error = error or unreadable
    local = torch.zeros((), dtype=torch.float64, device=states[0].device)
    if error is not None:
        local = local + math.nan
    elif filled:
        local = on_device(torch.nn.utils.get_total_norm(filled, norm_type), local.device).to(local)
    # [S1]
    total = _over_ranks(
        states[0], local, norm_type, error, [each for each in ignored.values() if each.numel()]
    )
    # ranks whose arguments differ are told when they compare their transfers
    limit, strict = float(max_norm), bool(error_if_nonfinite)
    what = f"the gradients to max_norm={limit} of norm {norm_type}{', if it is finite' * strict}"
    states[0].log.note("clipping", what, norm_type, limit, strict)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they "
            "can't be clipped. Set error_if_nonfinite=False to scale by it anyway."
        )
    wide = any(each.dtype == torch.float64 for each in (*chunks, *ignored))
    total = total.to(torch.float64 if wide else torch.float32)
    elsewhere = {id(each.part.parameter) for each in in_files}
    torch.nn.utils.clip_grads_with_norm_(
        [*(chunk for chunk in chunks if id(chunk) not in elsewhere), *ignored], max_norm, total
    )
    if in_files:
        scale_in_files(in_files, max_norm, total)
    return total


@torch.no_grad()
def clip_held(
    model: nn.Module,
    held: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """As `clip_grad_norm_`, of what an optimizer holds, the same one on all ranks: no other
    gradient counts, or is scaled.
    """
    states, own = used_together(model, "clip_grad_norm_"), set(map(id, held))
    parts = parts_of(states)
    # every rank reduces, also one that holds no piece of a parameter
    reduce_deferred(part.grad for part in parts)
    others = [*parts, *(each.parameter for each in ignored_of(states))]
    hidden = [(each, each.grad) for each in others if id(each) not in own]
    try:
        for parameter, _ in hidden:
            parameter.grad = None
        return clip_grad_norm_(model, max_norm, norm_type, error_if_nonfinite)
    finally:
        for parameter, gradient in hidden:
            parameter.grad = gradient


def _over_ranks(
    first: LayerState,
    local: Tensor,
    norm_type: float,
    error: Exception | None,
    shared: list[Tensor],
) -> Tensor:
    """The norm over all ranks, from each rank's `local` norm, and gradients that all ranks have."""
    communicator, maximum = first.communicator, math.isinf(norm_type)
    total = local if maximum else local**norm_type
    if communicator.replica and error is None:
        total = torch.zeros_like(total)  # replicas have the same gradients, which count once
    what = "the norm of the gradients"
    (total,) = over_ranks(first, total[None], "clip_grad_norm_", what, error, maximum)
    if communicator.world_size == 1:
        return local
    if shared:
        beside = torch.nn.utils.get_total_norm(shared, norm_type).to(total)
        total = torch.maximum(total, beside) if maximum else total + beside**norm_type
    return total if maximum else total ** (1.0 / norm_type)


def _checked(norm_type: float, max_norm: float) -> tuple[float, Exception | None]:
    """Returns the order of the norm, and the caller's mistake. A rank with a mistake takes part in
    the sum, so it needs an order.
    """
    try:
        order = float(norm_type)
        # torch would scale by a negative number, which turns all gradients around
        if order > 0 and max_norm >= 0:
            return order, None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return 2.0, TypeError(
            f"norm_type and max_norm must be numbers, found {norm_type!r} and {max_norm!r}"
        )
    known = order if math.isinf(order) else 2.0
    return known, ValueError(
        f"norm_type must be positive and max_norm at least 0, found {order} and {max_norm}"
    )
