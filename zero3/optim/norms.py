"""parameter_norms(): the norms of parameters and of their gradients."""

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
from ..core.parameters import ShardedParameter
from .gradients_in_files import Norms
from .param_groups import named_parameters
from .pieces import parts_of

__all__: list[str] = []


@torch.no_grad()
def parameter_norms(model: nn.Module, of: Literal["grad", "param"] = "grad", norm_type: float = 2.0) -> dict[str, Tensor]:
    """Returns the norm of each parameter, or of its gradient, by its name in the unwrapped model. Every rank calls it.

    It makes one all-reduce, of a number for each parameter. On a GPU the host does not wait for it.

    Args:
        model: Any model that contains zero3 layers.
        of: "grad": gradients of trainable parameters, 0 for a parameter without one. "param": values of all parameters, also frozen.
        norm_type: p of the p-norm; `float("inf")` for the largest element.

    Returns:
        Name to norm, as 0-dim float64 tensors in the model's order, the same on all ranks. A tied parameter appears once, under its
        first name.

    Raises:
        ValueError: Nothing in `model` is sharded, `norm_type` is not positive, or `of` is neither "grad" nor "param". Every rank
            raises it; on a GPU, ranks with right arguments get nan instead.
        TypeError: `norm_type` is no number. The same ranks raise it.

    Example::

        loss_of(model, batch).backward()
        for name, norm in zero3.parameter_norms(model).items():
            print(name, norm.item())
    """
    states = states_of(model)
    norm_type, error = _checked(of, norm_type)
    communicator, maximum = states[0].communicator, math.isinf(norm_type)
    # every rank reduces, also one that holds no piece of a parameter
    try:
        reduce_deferred(part.grad for part in parts_of(states))
    except NotReducedError:
        if of != "param":
            raise
    named = [(name, sharded) for name, _, sharded in named_parameters(model, states)]  # for any `of`, so that ranks add up equally many
    values = torch.full((len(named),), 0.0 if error is None else math.nan, dtype=torch.float64, device=states[0].device)
    if error is None and not communicator.replica:  # replicas hold the same values, which count once
        _add_own(values, [sharded for _, sharded in named], communicator.shard_rank, of, norm_type)
    with NamingFailures(communicator, "summing up", Subject("the norms of the parameters")):
        communicator.all_reduce(values.view(torch.int64) if maximum else values, maximum=maximum)  # as integers: see clip_grad_norm_
    agree_where_nan(communicator, states[0].device, "parameter_norms", values, error)
    states[0].log.note("measuring", f"the {of}s' norms {norm_type}", of == "param", norm_type)  # see clip_grad_norm_
    values = values if maximum else values ** (1.0 / norm_type)
    asked = [of == "param" or sharded.chunk.shard.requires_grad for _, sharded in named]
    return {name: value for (name, _), value, is_asked in zip(named, values, asked, strict=True) if is_asked}


def _add_own(values: Tensor, named: list[ShardedParameter], rank: int, of: str, norm_type: float) -> None:
    """Writes the norms of this rank's pieces into `values`, to the power of `norm_type` unless that is infinite."""
    rows = {(sharded.chunk, sharded.index): row for row, sharded in enumerate(named)}
    for chunk in dict.fromkeys(sharded.chunk for sharded in named if of == "param" or sharded.chunk.shard.requires_grad):
        indices = {slot: index for index, slot in enumerate(chunk.layout.slots)}
        for piece in chunk.layout.pieces(rank):
            flat = slice_of(chunk, piece.place.start, piece.place.stop, of)
            if flat is not None:
                norm = _norm(flat, norm_type)
                values[rows[chunk, indices[piece.slot]]] = norm if math.isinf(norm_type) else norm.double() ** norm_type


def _checked(of: str, norm_type: float) -> tuple[float, Exception | None]:
    """Returns the order of the norm, and the caller's mistake. A rank with a mistake takes part in the sum, so it needs an order."""
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


def gradients_to_measure(model: nn.Module, states: list[LayerState], in_files: Norms) -> list[Tensor]:
    """Returns this rank's part of the gradients. On a single rank they are cut into parameters, in the model's order, so that the
    norm has the bits of torch's own. `in_files`: norms of some, which stand for them, since the norm of norms is the norm."""
    if states[0].communicator.world_size > 1:
        parts = [(chunk, part) for state in states for chunk in state.chunks for part in chunk.parts if part.parameter.grad is not None]
        found = [in_files.get((chunk, (part.start, part.stop)), part.parameter.grad) for chunk, part in parts]
        return [gradient.as_subclass(Tensor) for gradient in found if gradient is not None]
    slots = [(sharded.chunk, sharded.chunk.layout.slots[sharded.index]) for _, _, sharded in named_parameters(model, states)]
    known = [(chunk, slot, in_files.get((chunk, (slot.offset, slot.stop)))) for chunk, slot in slots]
    slices = [slice_of(chunk, slot.offset, slot.stop, "grad") if norm is None else norm for chunk, slot, norm in known]
    return [gradient for gradient in slices if gradient is not None]


def slice_of(chunk: Chunk, start: int, stop: int, of: str) -> Tensor | None:
    """Returns elements of the chunk (`of` is "param") or of its gradient, or None if it has no gradient there."""
    if of == "param":
        return chunk.shard.data[start:stop]
    for part in chunk.parts:
        if part.start <= start and stop <= part.stop and part.parameter.grad is not None:
            return part.parameter.grad.as_subclass(Tensor).reshape(-1)[start - part.start : stop - part.start]
    return None
