"""parameter_norms(): the norms of parameters and of their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from ..access import sharded_in, used_in_step
from ..comm.agreement import agree, agree_where_nan
from ..comm.communicator import is_first
from ..comm.errors import NamingFailures, Subject
from ..comm.factory import IDENTITY_BYTES
from ..core.account import Account
from ..core.chunk import Chunk
from ..core.chunk_gradient import NotReducedError, reduce_deferred
from ..core.flat import view
from ..core.ignored import IgnoredGradient
from ..core.layer_state import LayerState, chunks_of, ignored_of, parts_of
from ..core.parameters import ShardedParameter
from ..modules import plain_modules
from ..names import named_tensors
from .gradients_in_files import Norms

__all__: list[str] = []


@torch.no_grad()
def parameter_norms(
    model: nn.Module, of: Literal["grad", "param"] = "grad", norm_type: float = 2.0
) -> dict[str, Tensor]:
    """Returns the norm of each parameter, or of its gradient, by its name in the unwrapped model.
    Every rank calls it.

    It makes one all-reduce, of a number for each parameter, and one of the gradients of parameters
    that the policy's `ignored` leaves alone. On a GPU the host does not wait for it. Quantised
    parameters are gathered for it, one chunk after another, and ranks compare the arguments before.

    Args:
        model: Any model that contains zero3 layers, or any module inside one. Names are those
            inside this module.
        of: "grad": gradients of trainable parameters, 0 for a parameter without one. "param":
            values of all parameters, also frozen; of quantised ones the values that they stand for.
            For a parameter that `ignored` leaves alone, these are the mean of all ranks' gradients
            (or the sum, as `gradient_reduction` says), and rank 0's values.
        norm_type: p of the p-norm; `float("inf")` for the largest element.

    Returns:
        Name to norm, as 0-dim float64 tensors in the model's order, the same on all ranks. A tied
        parameter appears once, under its first name.

    Raises:
        ValueError: Nothing in `model` is sharded, `norm_type` is not positive, or `of` is neither
            "grad" nor "param". Every rank raises it; on a GPU, ranks with right arguments get nan
            instead.
        TypeError: `norm_type` is no number. The same ranks raise it.

    Example::

        loss_of(model, batch).backward()
        for name, norm in zero3.parameter_norms(model).items():
            print(name, norm.item())
    """
    states = used_in_step(model, "parameter_norms")
    norm_type, error = _checked(of, norm_type)
    communicator, maximum = states[0].communicator, math.isinf(norm_type)
    # every rank reduces, also one that holds no piece of a parameter
    try:
        reduce_deferred(part.grad for part in parts_of(states))
    except NotReducedError:
        if of != "param":
            raise
    named = _named(model, states)  # for any `of`, so that ranks add up equally many
    start, device = 0.0 if error is None else math.nan, states[0].device
    values = torch.full((len(named),), start, dtype=torch.float64, device=device)
    quantized = [state for state in states if any(chunk.read_only for chunk in state.chunks)]
    if quantized:
        agree(states[0], "parameter_norms", [f"of={of!r}"], error)
    alone = ignored_in(model, states)
    ignored = ignored_gradients(states, alone, "parameter_norms")
    if error is None:
        rows = {key: row for row, (_, key) in enumerate(named)}
        if not communicator.replica:  # replicas hold the same values, which count once
            _add_own(values, rows, of, norm_type)
        whole: Iterable[tuple[ShardedParameter | nn.Parameter, Tensor]] = (
            chain(
                ((e.parameter, e.parameter.detach()) for e in alone), *map(_dequantised, quantized)
            )
            if of == "param"
            else ignored.items()
        )
        for key, flat in whole:
            if is_first(communicator) and key in rows:
                values[rows[key]] = _power(flat, norm_type)
    # [1, n]: of another shape than what other functions sum up
    what = "the norms of the parameters"
    (values,) = over_ranks(states[0], values[None], "parameter_norms", what, error, maximum)
    # see clip_grad_norm_
    states[0].log.note("measuring", f"the {of}s' norms {norm_type}", of == "param", norm_type)
    values = values if maximum else values ** (1.0 / norm_type)
    return {
        name: value
        for (name, key), value in zip(named, values, strict=True)
        if of == "param"
        or (key.chunk.shard if isinstance(key, ShardedParameter) else key).requires_grad
    }


def over_ranks(
    first: LayerState,
    powers: Tensor,
    caller: str,
    what: str,
    error: Exception | None,
    maximum: bool,
) -> Tensor:
    """The sums over ranks of norms' powers, or the largest, from each rank's `powers`, at least
    0.

    Raises:
        ValueError: Ranks have called it for different models. On an accelerator they are told when
            they compare their transfers.
    """
    communicator, ranks = first.communicator, first.communicator.world_size
    own: list[int] = []
    if ranks > 1 and communicator.tags_messages:  # which sums lack: they say which model's they are
        own = [first.chunks.identity, (1 << 8 * IDENTITY_BYTES) - first.chunks.identity]
        said = powers.new_tensor(own).expand(*powers.shape[:-1], -1)
        powers = torch.cat([powers, said], -1)
    with NamingFailures(communicator, "summing up", Subject(what), caller):
        # Read as integers, positive numbers keep their order, and nan is the largest. A maximum of
        # floats may lose nan.
        communicator.all_reduce(
            powers.abs_().view(torch.int64) if maximum else powers, maximum=maximum
        )
    numel = powers.shape[-1] - len(own)
    sums, found = powers[..., :numel], powers[..., numel:]
    if own and found.flatten().tolist() != [each if maximum else each * ranks for each in own]:
        agree(first, caller, [f"the model of {first.name_among_ranks}"])
    agree_where_nan(first, caller, sums, error)
    return sums


def _named(
    model: nn.Module, states: list[LayerState]
) -> list[tuple[str, ShardedParameter | nn.Parameter]]:
    """Every parameter once, also those that are left alone, in the unwrapped model's order."""
    keys: dict[int, ShardedParameter | nn.Parameter] = {**sharded_in(states)}
    keys |= {id(each.parameter): each.parameter for each in ignored_in(model, states)}
    named = named_tensors(model)
    return [(name, keys.pop(id(tensor))) for name, tensor in named if id(tensor) in keys]


def ignored_in(model: nn.Module, states: list[LayerState]) -> list[IgnoredGradient]:
    """The parameters in `model` that its layers leave alone. A layer may leave others alone too."""
    found = {id(each.parameter): each for each in ignored_of(states)}
    if not found:
        return []
    inside = {id(each) for module in plain_modules(model) for each in module._parameters.values()}
    return [each for key, each in found.items() if key in inside]


def ignored_gradients(
    states: list[LayerState], alone: list[IgnoredGradient], caller: str
) -> dict[nn.Parameter, Tensor]:
    """The gradients of parameters that are left `alone`, over all ranks. Every rank calls it, in
    `caller`.

    They are the ranks' mean, or sum, as `gradient_reduction` says. What the caller has made equal
    on all ranks is its own mean.
    """
    found = [each for each in alone if each.parameter.requires_grad]
    if not found:
        return {}
    own = [each.parameter for each in found]
    first = states[0]
    wide = any(each.dtype in (torch.float64, torch.complex128) for each in own)
    dtype = torch.float64 if wide else torch.float32
    flats = [
        torch.zeros_like(each, layout=torch.strided)
        if each.grad is None
        else each.grad.detach().to_dense()
        for each in own
    ]
    reals = [
        (torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat).reshape(-1)
        for flat in flats
    ]
    whole = torch.cat([real.to(first.device, dtype) for real in reals])
    if first.communicator.world_size > 1:
        with NamingFailures(
            first.communicator, "summing up", Subject("the gradients of ignored parameters"), caller
        ):
            first.communicator.all_reduce(whole)
    parts = torch.split(whole, [real.numel() for real in reals])
    means = [part for ignored, part in zip(found, parts, strict=True) if ignored.mean]
    for each in [whole] if len(means) == len(parts) else means:
        each /= first.communicator.world_size
    return {
        each: torch.view_as_complex(part.view(-1, 2)) if each.is_complex() else part
        for each, part in zip(own, parts, strict=True)
    }


def _dequantised(state: LayerState) -> Iterator[tuple[ShardedParameter, Tensor]]:
    """The layer's quantised parameters, with their values: one chunk is gathered after another."""
    for chunk in state.chunks:
        if chunk.read_only:
            own = chunk.shard.data.to(chunk.device)
            full = own.new_empty(chunk.layout.padded_numel)
            chunk.whole.communicator.all_gather(full, own, chunk.layout.bounds).wait()
            for sharded in state.parameters:
                if sharded.chunk is chunk:
                    slot = view(full, chunk.layout, sharded.index)
                    yield sharded, sharded.sites.face.value(sharded.sites, slot)


def _add_own(
    values: Tensor,
    row_of: Mapping[ShardedParameter | nn.Parameter, int],
    of: str,
    norm_type: float,
) -> None:
    """Writes the norms of this rank's pieces into `values`, as `_power` gives them."""
    rows = {
        (key.chunk, key.index): row
        for key, row in row_of.items()
        if isinstance(key, ShardedParameter) and not key.chunk.read_only
    }
    for chunk in dict.fromkeys(
        chunk for chunk, _ in rows if of == "param" or chunk.shard.requires_grad
    ):
        indices = {slot: index for index, slot in enumerate(chunk.layout.slots)}
        for piece in chunk.pieces:
            flat = slice_of(chunk, piece.place.start, piece.place.stop, of)
            row = rows.get((chunk, indices[piece.slot]))  # None: outside of the model
            if flat is not None and row is not None:
                values[row] = _power(flat, norm_type)


def _checked(of: str, norm_type: float) -> tuple[float, Exception | None]:
    """Returns the order of the norm, and the caller's mistake. A rank with a mistake takes part in
    the sum, so it needs an order.
    """
    try:
        order = float(norm_type)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return 2.0, TypeError(f"norm_type must be a number, found {norm_type!r}")
    if not order > 0:
        return order, ValueError(f"norm_type must be positive, found {order}")
    return order, None if of in ("grad", "param") else ValueError(
        f'of must be "grad" or "param", found {of!r}'
    )


def _power(flat: Tensor, order: float) -> Tensor:
    """The norm's, or the largest element. It is taken in float32 at least. What torch takes no norm
    of (integers, 8 bits) is converted; of complex numbers the absolute values count.
    """
    flat = flat.abs() if flat.is_complex() else flat
    if flat.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        flat = flat.double()
    wide = torch.promote_types(flat.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(flat, order, dtype=wide)
    return norm if math.isinf(order) else norm.double() ** order


def gradients_to_measure(
    model: nn.Module,
    states: list[LayerState],
    in_files: Norms,
    ignored: Mapping[nn.Parameter, Tensor],
) -> list[Tensor]:
    """Returns this rank's part of the gradients. On a single rank they are cut into parameters, in
    the model's order, so that the norm has the bits of torch's own. `in_files`: norms of some,
    which stand for them, since the norm of norms is the norm. `ignored`: the result of
    `ignored_gradients`, which belongs to all ranks, and counts here on a single one.
    """
    if states[0].communicator.world_size > 1:
        found = [
            in_files.get((chunk, (part.start, part.stop)), part.parameter.grad)
            for chunk in chunks_of(states)
            for part in chunk.parts
        ]
        return [gradient.as_subclass(Tensor) for gradient in found if gradient is not None]
    slices: list[Tensor | None] = []
    accounts = {c: account for state in states for c, account in state.gradients.accounts.items()}
    for _, key in _named(model, states):
        if isinstance(key, ShardedParameter):
            slot = key.chunk.layout.slots[key.index]
            norm = in_files.get((key.chunk, (slot.offset, slot.stop)))
            if norm is None:
                norm = slice_of(key.chunk, slot.offset, slot.stop, "grad")
                norm = reaching(accounts[key.chunk], key.index, norm)
            slices.append(norm)
        else:
            slices.append(ignored.get(key))
    return [gradient for gradient in slices if gradient is not None]


def reaching(account: Account, index: int, gradient: Tensor | None) -> Tensor | None:
    """None if nothing has reached slot number `index`: no backward, and nobody else either, as a
    penalty over chunks does. Then its gradient is zero.
    """
    if gradient is None or (index in account.unreached.slots and not gradient.any()):
        return None
    return gradient


def slice_of(chunk: Chunk, start: int, stop: int, of: str) -> Tensor | None:
    """Returns elements of a slot in the chunk (`of` is "param") or in its gradient, or None if it
    has no gradient there.
    """
    if of == "param":
        return chunk.shard.data[start:stop]
    for part in chunk.parts:
        if part.start <= start and stop <= part.stop and part.parameter.grad is not None:
            return part.parameter.grad.as_subclass(Tensor).reshape(-1)[
                start - part.start : stop - part.start
            ]
    return None
