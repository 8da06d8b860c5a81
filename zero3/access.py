"""Parameters outside compute, and the way back after an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .comm.agreement import agree
from .core.layer_state import LayerState
from .core.parameters import ShardedParameter, named
from .layer import Zero3Layer, layers_of

__all__: list[str] = []

_UNDONE = (
    ", and that is undone: the chunks on all ranks hold the old values. A module that notes the change (as RWKV does in eval, or peft's "
    "merge_adapter) is wrong from now on. Make such changes, and take them back, inside `with zero3.full_params(model, writeback=True):`, "
    "where they stay."
)


def get_trainable_chunk(model: nn.Module) -> list[nn.Parameter]:
    """This rank's trainable chunks, 1-D `[S]`, of every layer in `model`: what any optimizer takes.

    Raises:
        ValueError: nothing in `model` is sharded.
    """
    return [chunk for state in states_of(model) for chunk in state.trainable()]


@contextmanager
def full_params(module: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Inside, the parameters of `module` are whole and readable under their own names, and there are no chunks.

        with zero3.full_params(model.head):
            norm = model.head.weight.norm()

    Every rank enters and leaves it (it gathers). All layers of `module` are held at once, in the dtypes that the chunks have
    (with `param_dtype` a forward inside is an error: see `resident`). Changes are lost at the end,
    unless `writeback`: then rank 0's values become everybody's, if the block ends without an exception on all ranks. (On
    one rank the parameters are the chunks: changes stay.) What is kept of them, as views or state dicts, stays readable.

    Args:
        module: a sharded model, a layer, or any module inside one (whose whole layer is gathered).

    Raises:
        ValueError: nothing in `module` is sharded.
        RuntimeError: at the end, if `requires_grad` of a parameter was changed: only whole chunks can be frozen; or if a
            module was given another parameter. Both are undone.
    """
    with pinned(states_of(module), f"full_params(writeback={writeback})", writeback=writeback):
        yield


@contextmanager
def pinned(states: list[LayerState], caller: str, *, writeback: bool = False, to_compute: bool = False) -> Iterator[None]:
    """Inside, `states` are fetched: as they are stored, or as they compute. `caller`: what the ranks compare before they gather."""
    rank = states[0].communicator.rank
    agree_to_gather(states, caller)
    pins: list[_Pin] = []
    written: list[str] = []
    try:
        for state in states:
            undone = to_compute and not state.pinned  # else an outer context says what becomes of changes
            state.pin(to_compute=to_compute)
            pins.append(_Pin(state, undone=undone))
        error: BaseException | None = None
        try:
            yield
            written = [name for pin in pins for name in pin.written()]
        except BaseException as caught:
            error = caught
            raise
        finally:
            if writeback:
                _write_back(states, error)
    finally:
        toggled = [name for pin in pins for name in pin.undo_toggles()] if not to_compute else []
        replaced = [f"{b.sites.name!r} of layer {pin.state.label}" for pin in pins for b in pin.state.parameters if b.sites.replaced()]
        for pin in pins:
            pin.state.unpin()
    if toggled:
        raise RuntimeError(
            f"rank {rank}: requires_grad was changed inside {caller}, of {', '.join(toggled)}. A chunk is "
            "trained or frozen as a whole, so this was undone: freeze parameters before sharding, or use requires_grad_ of a layer's chunk."
        )
    if replaced:
        raise RuntimeError(
            f"rank {rank}: inside {caller}, {', '.join(replaced)} was replaced by another object. A sharded parameter stays one object "
            "for life, so this was undone: give it other values (parameter.data = values), with writeback=True."
        )
    if written:
        raise RuntimeError(f"rank {rank}: inside {caller}, the values of {named(written)} were changed{_UNDONE}")


class _Pin:
    """A layer that has just been pinned, and what its parameters were like then."""

    def __init__(self, state: LayerState, *, undone: bool) -> None:
        """`undone`: whether changes are undone at the end."""
        self.state = state
        self._trained = [sharded.sites.parameter.requires_grad for sharded in state.parameters]
        self._samples = [_sample(sharded.sites.parameter.data) for sharded in state.parameters] if undone else []

    def undo_toggles(self) -> list[str]:
        """The parameters whose `requires_grad` was changed meanwhile; it is again what it was."""
        before = zip(self.state.parameters, self._trained, strict=True)
        toggled = [sharded for sharded, trained in before if sharded.sites.parameter.requires_grad != trained]
        for sharded in toggled:
            sharded.sites.parameter.requires_grad_(not sharded.sites.parameter.requires_grad)
        return [self._name(sharded) for sharded in toggled]

    def written(self) -> list[str]:
        """The parameters that were given other values, and will lose them; not those that were changed back, but for rounding."""
        changed = []
        for sharded, before in zip(self.state.parameters, self._samples, strict=bool(self._samples)):
            stays = _sample(sharded.value) if sharded.chunk.resident else before  # on one rank the chunk itself may have been written
            if not _but_for_rounding(_sample(sharded.sites.parameter.data), stays):
                changed.append(self._name(sharded))
        return changed

    def _name(self, sharded: ShardedParameter) -> str:
        return f"{sharded.sites.name!r} of layer {self.state.label}"


def _sample(values: Tensor, size: int = 256) -> Tensor:
    """Some of a parameter's values, the same on all ranks: writes by `.data` leave no other trace."""
    flat = values.flatten()
    return flat[:: max(1, flat.numel() // size)].clone()


def _but_for_rounding(found: Tensor, expected: Tensor) -> bool:
    """Whether they are equal, or as far apart as something added and taken away again leaves them."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if torch.equal(found, expected) or not expected.numel():
        return True
    if not expected.is_floating_point():
        return False
    here, there = found.double(), expected.double()
    apart = (here - there).masked_fill(here.isnan() & there.isnan(), 0)
    return bool(apart.norm() <= 16 * torch.finfo(expected.dtype).eps * there.nan_to_num().norm())


def _merged_adapters(model: nn.Module) -> dict[str, list[str]]:
    """What peft's modules note of merging: in bf16 a merge may be as small as rounding, and is wrong nevertheless if it is undone."""
    notes = {name: getattr(module, "merged_adapters", None) for name, module in model.named_modules()}
    return {name: list(merged) for name, merged in notes.items() if isinstance(merged, list) and merged}


@contextmanager
def resident(model: nn.Module) -> Iterator[None]:
    """For inference: inside, layers stay fetched and forwards make no collectives, so every rank may go its own way.

        with zero3.resident(model), torch.no_grad():
            ids = model.generate(**prompt)                      # another prompt and length on every rank

    Every rank enters and leaves it. The whole model is held meanwhile. Parameters are readable under their own names, in
    the dtypes they compute in.

    Raises:
        RuntimeError: a backward through what was computed inside; at the end, if parameters were changed inside, for that is undone.
        ValueError: nothing in `model` is sharded.
    """
    states = states_of(model)
    merged, stays = _merged_adapters(model), all(state.pinned or all(chunk.resident for chunk in state.chunks) for state in states)
    with pinned(states, "resident", to_compute=True):
        for state in states:
            state.resident += 1
        try:
            yield
        finally:
            for state in states:
                state.resident -= 1
    changed = [name for name, adapters in _merged_adapters(model).items() if adapters != merged.get(name)]
    if changed and not stays:
        raise RuntimeError(f"rank {states[0].communicator.rank}: inside resident, adapters were merged into {named(changed)}{_UNDONE}")


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """For gradient accumulation: backwards inside communicate no gradients. They join the first backward after it.

        for micro_batch in micro_batches[:-1]:
            with zero3.no_sync(model):
                loss(model(micro_batch)).backward()
        loss(model(micro_batches[-1])).backward()

    Every rank enters and leaves it. It saves all reductions but one, for memory: every layer that it covers keeps its full
    gradient, `W * S` elements in `reduce_dtype`, until that backward. (Without it, micro-batches accumulate in the chunk.)
    The same numbers, but for the order of sums. Zeroing the gradients drops what was kept. Any module inside a model, and any
    part of a step, may be covered; at world size 1 it does nothing.

    Raises:
        ValueError: nothing in `model` is sharded.
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
        state.write_back()


def reset(model: nn.Module) -> None:
    """After an exception: releases every layer and drops the step that broke. The next forward does it by itself too.

    Gradients accumulated before are dropped as well (set to None) if it was a backward that broke.

    Raises:
        ValueError: nothing in `model` is sharded.
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
