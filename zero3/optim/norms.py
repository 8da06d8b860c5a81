"""The norms of parameters and of their gradients, for who adapts by them or draws them."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from ..access import states_of
from ..comm.agreement import agree_where_nan
from ..comm.errors import NamingFailures, Subject
from ..core.chunk import Chunk
from ..core.gradient_types import NotReducedError, reduce_deferred
from ..core.layer_state import LayerState
from .param_groups import named_parameters

__all__: list[str] = []


@torch.no_grad()
def parameter_norms(model: nn.Module, of: Literal["grad", "param"] = "grad", norm_type: float = 2.0) -> dict[str, Tensor]:
    """The norm of each parameter, or of its gradient, by its name in the unwrapped model. Every rank calls it.

    It makes one all-reduce, of a number for each parameter, and does not make the host wait.

    Args:
        model: Any model that contains zero3 layers.
        of: "grad": gradients of trainable parameters, 0 where there is none. "param": values of all parameters, frozen ones too.
        norm_type: p of the p-norm; `float("inf")` for the largest element.

    Returns:
        Name to norm, as 0-dim float64 tensors in the model's order, the same on all ranks. A tied parameter stands once, under its
        first name.

    Raises:
        ValueError: `norm_type` is not positive, or `of` is neither "grad" nor "param"; on every rank (on a GPU the others get nan).
            Nothing in `model` is sharded.
        TypeError: `norm_type` is no number; on every rank.

    Example::

        loss_of(model, batch).backward()
        for name, norm in zero3.parameter_norms(model).items():
            print(name, norm.item())
    """
    states = states_of(model)
    norm_type, error = _checked(of, norm_type)
    communicator, maximum = states[0].communicator, math.isinf(norm_type)
    # on every rank, whether it has a piece of a parameter or not
    try:
        reduce_deferred(part.parameter.grad for state in states for chunk in state.chunks for part in chunk.parts)
    except NotReducedError:
        if of != "param":
            raise
    named = [(name, sharded) for name, _, sharded in named_parameters(model, states)]  # whatever `of` is: all ranks sum up equally many
    rows = {(sharded.chunk, sharded.index): row for row, (_, sharded) in enumerate(named)}
    values = torch.zeros(len(named), dtype=torch.float64, device=states[0].device)
    asked = {sharded.chunk: of == "param" or sharded.chunk.shard.requires_grad for _, sharded in named} if error is None else {}
    for chunk in (chunk for chunk, is_asked in asked.items() if is_asked):
        indices = {slot: index for index, slot in enumerate(chunk.layout.slots)}
        for piece in chunk.layout.pieces(communicator.rank):
            flat = slice_of(chunk, piece.offset, piece.offset + piece.stop - piece.start, of)
            if flat is not None:
                norm = _norm(flat, norm_type)
                values[rows[chunk, indices[piece.slot]]] = norm if maximum else norm.double() ** norm_type
    if error is not None:
        values.fill_(math.nan)
    with NamingFailures(communicator, "summing up", Subject("the norms of the parameters")):
        if maximum:
            communicator.all_reduce(values.view(torch.int64), maximum=True)  # see clip_grad_norm_
        else:
            communicator.all_reduce(values)
    agree_where_nan(communicator, states[0].device, "parameter_norms", values, error)
    states[0].log.note("measuring", f"the {of}s' norms {norm_type}", of == "param", norm_type)  # see clip_grad_norm_
    values = values if maximum else values ** (1.0 / norm_type)
    return {name: value for (name, sharded), value in zip(named, values, strict=True) if asked.get(sharded.chunk)}


def _checked(of: str, norm_type: float) -> tuple[float, Exception | None]:
    """The order of the norm, by which a rank takes part in the sum even if it has found a mistake."""
    try:
        order = float(norm_type)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return 2.0, TypeError(f"norm_type must be a number, found {norm_type!r}")
    if not order > 0:
        return order, ValueError(f"norm_type must be positive, found {order}")
    return order, None if of in ("grad", "param") else ValueError(f'of must be "grad" or "param", found {of!r}')


def _norm(flat: Tensor, order: float) -> Tensor:
    """In float32 at least. What torch takes no norm of (integers, 8 bits) is converted; of complex numbers the absolute values count."""
    flat = flat.abs() if flat.is_complex() else flat
    if flat.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        flat = flat.double()
    norm: Tensor = torch.linalg.vector_norm(flat, order, dtype=torch.promote_types(flat.dtype, torch.float32))
    return norm


def gradients_to_measure(model: nn.Module, states: list[LayerState]) -> list[Tensor]:
    """This rank's part of the gradients. One rank alone takes them by parameters, in the model's order: then torch's very bits come out."""
    if states[0].communicator.world_size > 1:
        parts = [part.parameter for state in states for chunk in state.chunks for part in chunk.parts]
        return [part.grad.as_subclass(Tensor) for part in parts if part.grad is not None]
    slots = [(sharded.chunk, sharded.chunk.layout.slots[sharded.index]) for _, _, sharded in named_parameters(model, states)]
    slices = [slice_of(chunk, slot.offset, slot.stop, "grad") for chunk, slot in slots]
    return [gradient for gradient in slices if gradient is not None]


def slice_of(chunk: Chunk, start: int, stop: int, of: str) -> Tensor | None:
    """Elements of the chunk, or of its gradient if it has one there."""
    if of == "param":
        return chunk.shard.data[start:stop]
    for part in chunk.parts:
        if part.start <= start and stop <= part.stop and part.parameter.grad is not None:
            return part.parameter.grad.as_subclass(Tensor).reshape(-1)[start - part.start : stop - part.start]
    return None
