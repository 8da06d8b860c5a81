"""Gradients by the names of the model's own parameters: this rank's slices, or whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from ..access import used, used_together
from ..comm.agreement import agree, writing_at_end
from ..comm.communicator import is_first
from ..core.chunk import Chunk
from ..core.chunk_gradient import reduce_deferred
from ..core.flat import split, view
from ..core.layer_state import LayerState, parts_of
from ..core.parameters import ShardedParameter
from .norms import reaching, slice_of
from .param_groups import named_parameters
from .pieces import trains

__all__: list[str] = []


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's slice of each trainable parameter's gradient, by the parameter's name in the
    unwrapped model.

    The slices are views of the chunks' gradients. The optimizer sees a change that is made in
    place. Every element of a parameter is in one rank's slice, and the slices of all
    ranks, in rank order, are the whole gradient, flattened. Nothing is communicated. With
    `stage=1`, every rank calls it, because gradients that are not reduced yet are reduced first.

    For norms use `parameter_norms`: the norm of a slice is not that of the parameter.

    Args:
        model: Any model that contains zero3 layers, or any module inside one. Names are those
            inside this module.

    Returns:
        Name to a 1-D tensor, in the model's order. It is empty if other ranks hold the parameter. A
        tied parameter stands once, under its first name. Frozen parameters are left out, those that
        `param_groups` left out or the policy's `ignored` leaves alone, and those that no rank's
        gradient has reached since gradients were zeroed, as all are after `zero_grad()`.

    Raises:
        ValueError: Nothing in `model` is sharded.
        RuntimeError: The gradients are not reduced yet, as inside `no_sync`.

    Example::

        loss_of(model, batch).backward()
        for name, gradient in zero3.named_gradients(model).items():
            if name.endswith("bias"):
                gradient.mul_(0.1)
    """
    states = used(model, "named_gradients")
    reduce_deferred(part.grad for part in parts_of(states))
    found: dict[str, Tensor] = {}
    for name, state, sharded in _trainable(model, states):
        chunk, slot = sharded.chunk, sharded.chunk.layout.slots[sharded.index]
        if (gradient := _own_slice(state, sharded)) is not None:
            found[name] = gradient
        elif all(piece.slot != slot for piece in chunk.pieces) and _is_reached(state, sharded):
            found[name] = chunk.shard.data.new_empty(0, dtype=chunk.shard.grad_dtype)
    return found


@contextmanager
def full_gradients(model: nn.Module, *, writeback: bool = False) -> Iterator[dict[str, Tensor]]:
    """Context that yields the whole gradients of a model's trainable parameters, on every rank, by
    their names.

    Every rank enters and leaves it, because it gathers. It holds the gradients of all layers of
    `model` at once; for less, call it for one block after another. Nothing is fetched, and the
    parameters themselves stay as they are.

    Args:
        model: Any model that contains zero3 layers, or any module inside one. Names are those
            inside this module.
        writeback: At the end, rank 0's tensors are written to the gradients on all ranks, unless a
            rank has raised. Without it changes are lost.

    Yields:
        Name to a tensor in the parameter's shape, in the model's order. A tied parameter stands
        once, under its first name. The same parameters are left out as by `named_gradients`.

    Raises:
        ValueError: Nothing in `model` is sharded, or ranks have different layers in it; on every
            rank.
        RuntimeError: The gradients are not reduced yet, as inside `no_sync`.

    Example::

        for block in model.blocks:
            with zero3.full_gradients(block, writeback=True) as gradients:
                for gradient in gradients.values():
                    gradient.div_(gradient.norm().clamp(min=1.0))
    """
    states = used_together(model, "full_gradients")
    first, caller = states[0], f"full_gradients(writeback={writeback})"
    reduce_deferred(part.grad for part in parts_of(states))
    agree(first, caller, [state.name_among_ranks for state in states])
    trainable = _trainable(model, states)
    present = bytes(_is_present(state, sharded) for _, state, sharded in trainable)
    everywhere = first.communicator.exchange(present, first.device) if trainable else []
    anywhere = [any(flags) for flags in zip(*everywhere, strict=True)]
    wanted = [each for each, found in zip(trainable, anywhere, strict=True) if found]
    full = {chunk: _gathered(chunk) for chunk in dict.fromkeys(each.chunk for *_, each in wanted)}
    at_end = writing_at_end(first, caller, partial(_write, full))
    with at_end if writeback else nullcontext():
        yield {
            name: view(full[sharded.chunk], sharded.chunk.layout, sharded.index)
            for name, _, sharded in wanted
        }


def _trainable(
    model: nn.Module, states: list[LayerState]
) -> list[tuple[str, LayerState, ShardedParameter]]:
    named = named_parameters(model, states)
    return [found for found in named if trains(found[2].chunk, found[2].sites.name)]


def _own_slice(state: LayerState, sharded: ShardedParameter) -> Tensor | None:
    """This rank's elements of the gradient, 1-D. None without a gradient, or without elements."""
    chunk, slot = sharded.chunk, sharded.chunk.layout.slots[sharded.index]
    for piece in chunk.pieces:
        if piece.slot == slot:
            gradient = slice_of(chunk, piece.place.start, piece.place.stop, "grad")
            return reaching(state.gradients.accounts[chunk], sharded.index, gradient)
    return None


def _is_present(state: LayerState, sharded: ShardedParameter) -> bool:
    """Whether this rank knows of a gradient. An empty parameter lies on no rank."""
    if not sharded.sites.parameter.numel():
        return _is_reached(state, sharded)
    return _own_slice(state, sharded) is not None


def _is_reached(state: LayerState, sharded: ShardedParameter) -> bool:
    """Whether a backward has reached it, as far as this rank can tell: it may have nothing that
    trains.
    """
    chunk = sharded.chunk
    unreached = state.gradients.accounts[chunk].unreached.slots
    if sharded.index in unreached:
        return False
    trained, backward = state.chunks.trainable(), state.gradients.backward()
    absent = {chunk.layout.slots[index] for index in unreached}
    if absent and backward is not None and all(piece.slot in absent for piece in chunk.pieces):
        # what this rank has of the chunk may be none, and has no gradient of its own
        trained = [part for part in parts_of(backward.layers) if part.requires_grad]
    return not trained or any(parameter.grad is not None for parameter in trained)


@torch.no_grad()
def _gathered(chunk: Chunk) -> Tensor:
    """The chunk's whole gradient `[W*S]`. Where a rank has none it is zero."""
    own = torch.zeros_like(chunk.shard.data, dtype=chunk.shard.grad_dtype, device=chunk.device)
    for part in chunk.parts:
        if part.parameter.grad is not None:
            part.of(own).copy_(part.parameter.grad.as_subclass(Tensor))
    full = own.new_empty(chunk.layout.padded_numel)
    chunk.whole.communicator.all_gather(full, own, chunk.layout.bounds).wait()
    return full


@torch.no_grad()
def _write(full: Mapping[Chunk, Tensor]) -> None:
    for chunk, gradient in full.items():
        communicator = chunk.whole.communicator  # slices of experts may be in another order
        own = torch.empty_like(chunk.shard.data, dtype=chunk.shard.grad_dtype, device=chunk.device)
        slices = split(gradient, chunk.layout) if is_first(communicator) else None
        communicator.scatter(own, slices, chunk.layout.bounds).wait()
        for part in chunk.parts:
            if part.parameter.grad is not None:
                part.parameter.grad.as_subclass(Tensor).copy_(part.of(own))
