"""Parameters outside compute, and the way back after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from .comm.agreement import agree
from .core.layer_state import LayerState
from .core.pinning import pin, unpin, write_back
from .layer import Zero3Layer, layers_of

__all__: list[str] = []


def get_trainable_chunk(model: nn.Module) -> list[nn.Parameter]:
    """This rank's trainable chunks of every layer in a model: the parameters for the optimizer.

    An optimizer of chunks is exact if it treats each element by itself, as AdamW and SGD do. `param_groups` gives options by
    parameter and whole matrices, and `check_optimizer` says whether an optimizer is exact.

    Args:
        model: Any model that contains zero3 layers.

    Returns:
        One 1-D tensor `[S]` for each dtype of each layer or, after `param_groups`, the parts of these that it made.

    Raises:
        ValueError: Nothing in `model` is sharded.

    Example::

        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=3e-4)
    """
    return [chunk for state in states_of(model) for chunk in state.trainable()]


@contextmanager
def full_params(module: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Context in which the parameters of a module are whole, and readable under their own names.

    Every rank enters and leaves it, since it gathers. All layers of `module` are held at once, in the dtypes in which chunks are
    stored, and `parameters()` yields parameters instead of chunks. With `param_dtype` a forward inside is an error; `resident` is
    for computing. Changes are lost at the end unless `writeback` is set. (On one rank the parameters are the chunks, so changes
    stay.) Views and state dicts that are kept stay readable.

    Args:
        module: A sharded model, a layer, or any module inside one, whose whole layer is gathered.
        writeback: Rank 0's values become everybody's, if the block ends without an exception on all ranks.

    Raises:
        ValueError: Nothing in `module` is sharded.
        RuntimeError: At the end, if `requires_grad` of a parameter was changed, since only whole chunks can be frozen, or if a
            module was given another parameter. Both are undone.

    Example::

        with zero3.full_params(model.head):
            norm = model.head.weight.norm()
        with zero3.full_params(model.head, writeback=True):
            model.head.weight.data.mul_(0.5)
    """
    with _pinned(module, f"full_params(writeback={writeback})", writeback=writeback):
        yield


@contextmanager
def _pinned(module: nn.Module, caller: str, *, writeback: bool = False, to_compute: bool = False) -> Iterator[None]:
    states = states_of(module)
    rank = states[0].communicator.rank
    agree_to_gather(states, caller)
    pinned: list[LayerState] = []
    try:
        for state in states:
            pin(state, to_compute=to_compute)
            pinned.append(state)
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:
            error = caught
            raise
        finally:
            if writeback:
                _write_back(states, error)
    finally:
        toggled = [name for state in pinned for name in _undo_toggles(state)]
        replaced = [f"{b.sites.name!r} of layer {state.label}" for state in pinned for b in state.parameters if b.sites.replaced()]
        for state in pinned:
            unpin(state)
    if toggled:
        raise RuntimeError(
            f"rank {rank}: requires_grad was changed inside full_params, of {', '.join(toggled)}. A chunk is "
            "trained or frozen as a whole, so this was undone: freeze parameters before sharding, or use requires_grad_ of a layer's chunk."
        )
    if replaced:
        raise RuntimeError(
            f"rank {rank}: inside full_params, {', '.join(replaced)} was replaced by another object. A sharded parameter stays one object "
            "for life, so this was undone: give it other values (parameter.data = values), with writeback=True."
        )


@contextmanager
def resident(model: nn.Module) -> Iterator[None]:
    """Context for inference, in which all layers stay fetched and forwards make no collectives.

    So every rank may go its own way: generate from other prompts, at other lengths, or call the model a different number of times.
    Every rank enters and leaves it. The whole model is held meanwhile. Parameters are readable under their own names, in the
    dtypes in which they compute.

    Args:
        model: Any model that contains zero3 layers.

    Raises:
        RuntimeError: A backward runs through a forward that was made inside.
        ValueError: Nothing in `model` is sharded.

    Example::

        with zero3.resident(model), torch.no_grad():
            ids = model.generate(**prompt, max_new_tokens=4)
    """
    states = states_of(model)
    with _pinned(model, "resident", to_compute=True):
        for state in states:
            state.resident += 1
        try:
            yield
        finally:
            for state in states:
                state.resident -= 1


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context for gradient accumulation, in which backwards communicate no gradients.

    The first backward after it reduces all that was accumulated. Every rank enters and leaves it. It saves all reductions but one,
    and costs memory: every layer in it keeps its full gradient, `W * S` elements in `reduce_dtype`, until then. (Without it
    micro-batches add up in the chunk's gradient.) The numbers are the same but for the order of sums. Zeroing the gradients drops
    those that were kept. It may cover any module inside a model, and any part of a step. With one rank it does nothing.

    Args:
        model: Any model, or part of one, that contains zero3 layers.

    Raises:
        ValueError: Nothing in `model` is sharded.

    Example::

        for micro_batch in micro_batches[:-1]:
            with zero3.no_sync(model):
                loss_of(model, micro_batch).backward()
        loss_of(model, micro_batches[-1]).backward()
        optimizer.step()
    """
    gradients = [state.gradients for state in states_of(model)]
    for each in gradients:
        each.deferrals += 1
    try:
        yield
    finally:
        for each in gradients:
            each.deferrals -= 1


def agree_to_gather(states: list[LayerState], caller: str, error: Exception | None = None) -> None:
    """Compares before a gather outside a forward: one that a rank makes alone could meet another layer's on the others.

    Raises:
        ValueError, RuntimeError: ranks are elsewhere, or want other layers; the `error` of one of them.
    """
    if not all(state.pinned for state in states):  # else all is here, and a rank may look at it by itself
        first = states[0]
        agree(first.communicator, first.device, caller, [state.name_among_ranks for state in states], error)
    elif error is not None:
        raise error


def _undo_toggles(state: LayerState) -> list[str]:
    """The parameters whose `requires_grad` is no longer that of their chunk; it is again afterwards."""
    toggled = [sharded for sharded in state.parameters if sharded.sites.parameter.requires_grad != sharded.chunk.trains]
    for sharded in toggled:
        sharded.sites.parameter.requires_grad_(sharded.chunk.trains)
    return [f"{sharded.sites.name!r} of layer {state.label}" for sharded in toggled]


def _write_back(states: list[LayerState], error: BaseException | None) -> None:
    first = states[0]
    cause = RuntimeError(f"full_params(writeback=True) ended with {type(error).__name__}: {error}. Nothing was written.") if error else None
    try:
        agree(first.communicator, first.device, "the end of full_params", [], cause)
    except RuntimeError:
        if error is not None:
            return  # the user's own exception is on its way
        raise
    for state in states:
        write_back(state)


def reset(model: nn.Module) -> None:
    """Makes a model clean after an exception: releases every layer, and drops the step that broke.

    The next forward does so by itself; call this to have the memory back at once. If a backward broke, gradients that were
    accumulated before are dropped too (set to None).

    Args:
        model: Any model that contains zero3 layers.

    Raises:
        ValueError: Nothing in `model` is sharded.

    Example::

        try:
            loss_of(model, batch).backward()
        except torch.OutOfMemoryError:
            zero3.reset(model)
    """
    for layer in _layers(model):
        if layer._runtime is not None:
            layer._runtime.reset()
        layer._state.reset()


def states_of(module: nn.Module) -> list[LayerState]:
    """The layers in `module`; if it has none, the layers that its own parameters belong to."""
    if not isinstance(module, nn.Module):  # torch's own clip_grad_norm_ takes parameters
        raise TypeError(f"expected the sharded model, an nn.Module, found a {type(module).__name__}: pass the model, not its parameters")
    states = [layer._state for layer in layers_of(module)]
    for inner in module.modules():
        root = vars(inner).get("_zero3_root")
        if isinstance(root, LayerState):
            states.append(root)
    for inner in module.modules():
        for value in [*vars(inner).values(), *inner._parameters.values()]:
            owner = getattr(value, "zero3_state", None) if isinstance(value, nn.Parameter) else None
            state = owner() if owner is not None else None
            if state is not None and state not in states:
                states.append(state)
    if not states:
        raise ValueError(f"nothing in this {type(module).__name__} is sharded: wrap its layers in Zero3Layer first")
    return states


def _layers(model: nn.Module) -> list[Zero3Layer]:
    layers = layers_of(model)
    if not layers:
        raise ValueError(f"nothing in this {type(model).__name__} is sharded: wrap its layers in Zero3Layer first")
    return layers
