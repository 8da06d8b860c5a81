"""Functions for parameters outside forward and backward: chunks, full_params, resident, no_sync and
reset.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Literal

from torch import nn

from .comm.agreement import agree, writing_at_end
from .comm.communicator import is_first
from .comm.factory import divide_alike
from .conductors.conducted import unconducted
from .core.autograd import inside_backward
from .core.chunk_gradient import CallersMistake
from .core.collectives import Use
from .core.layer_state import LayerState, check_process
from .core.parameters import ShardedParameter
from .guards.calls import transformable
from .guards.marks import ignored_by, state_of
from .guards.optimizer_steps import steps_seen
from .layer import layers_of, runtimes_in, states_in
from .modules import named, plain_modules
from .pinning import Pin, pin, refuse_to_write, write_back

__all__: list[str] = []

_log = logging.getLogger("zero3")
_UNDONE = (
    ", and that is undone: the chunks on all ranks hold the old values. A module that notes the "
    "change (as RWKV does in eval, or peft's merge_adapter) is wrong from now on. Make such "
    "changes, and take them back, inside `with zero3.full_params(model, writeback=True):`, where "
    "they stay."
)


def is_sharded(model: nn.Module) -> bool:
    """Whether a model, or a part of one, holds zero3 layers or parameters of them. It makes no
    collective.

    Args:
        model: Any module.

    Returns:
        True if functions such as `get_trainable_chunk` take it.

    Raises:
        TypeError: `model` is no module.

    Example::

        if not zero3.is_sharded(model):
            zero3.shard(model)
    """
    return any(_found_in(model))


def get_trainable_chunk(model: nn.Module) -> list[nn.Parameter]:
    """This rank's trainable chunks of every layer in a model. They are the parameters for the
    optimizer.

    An optimizer on chunks is exact if it updates each element by itself, as AdamW and SGD do.
    `check_optimizer` tells whether an optimizer is exact. `param_groups` gives options by
    parameter, and whole matrices.

    Args:
        model: Any model that contains zero3 layers.

    Returns:
        One 1-D tensor `[S]` for each dtype of each layer or, after `param_groups`, the parts of
        chunks that it made; in the order of `model.parameters()`. A warning names parameters that
        train and are in no layer.

    Raises:
        ValueError: Nothing in `model` is sharded, or `model` is a part of another one, and
            parameters of both share a chunk.

    Example::

        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=3e-4)
    """
    states = states_of(model, whole=True)
    chunks = [chunk for state in states for chunk in state.chunks.trainable()]
    tell_of_outsiders(model, states)
    places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
    return sorted(chunks, key=lambda chunk: places.get(id(chunk), len(places)))


@contextmanager
def full_params(module: nn.Module, *, writeback: bool = False) -> Iterator[None]:
    """Context in which the full parameters of a module can be read under their own names.

    Every rank enters and leaves it, because it gathers. It holds all layers of `module` at once, in
    the dtypes of the chunks, and `parameters()` yields parameters instead of chunks. To compute
    inside, use `resident`: with `param_dtype`, a forward inside this context is an error. Changes
    are lost at the end unless `writeback` is set. (On one rank the parameters are the chunks, so
    changes stay.) Views and state dicts that the caller keeps stay readable.

    Args:
        module: A sharded model, a layer, or any module inside a layer, which is gathered as a
            whole.
        writeback: At the end, rank 0's values are written to the chunks of all ranks, unless a rank
            has raised.

    Raises:
        ValueError: Nothing in `module` is sharded.
        RuntimeError: An optimizer steps these layers inside. At the end, if the caller changed
            `requires_grad` of a parameter (only whole chunks can be frozen), or replaced a
            parameter by another object. Both are undone. With `writeback`, if a parameter is
            quantised: it is read-only.

    Example::

        with zero3.full_params(model.head):
            norm = model.head.weight.norm()
        with zero3.full_params(model.head, writeback=True):
            model.head.weight.data.mul_(0.5)
    """
    if writeback:
        refuse_to_write(states_of(module))
    caller = f"full_params(writeback={writeback})"
    with pinned(states_of(module), caller, "write" if writeback else "read"):
        yield


@contextmanager
def pinned(
    states: list[LayerState], caller: str, to: Literal["read", "write", "compute"]
) -> Iterator[None]:
    """Context in which `states` are fetched: in the dtypes of storage, to read them or to write
    rank 0's values back at its end, or in those of compute. Ranks compare `caller` before they
    gather.
    """
    rank = states[0].communicator.rank
    agree_to_gather(states, caller)
    pins, written = list[Pin](), list[str]()
    steps_seen().listen(pins)
    try:
        for state in states:
            undone = to == "compute" and not state.pinned  # an outer context may keep changes
            pin(state, to_compute=to == "compute")
            pins.append(Pin(state, undone=undone))
        first, write = states[0], partial(write_back, states)
        at_end = writing_at_end(first, caller, write)
        with at_end if to == "write" else nullcontext():
            yield
            written = [name for each in pins for name in each.written()]
    finally:
        steps_seen().forget(pins)
        toggled = [name for each in pins for name in each.undo_toggles()] if to != "compute" else []
        replaced = [name for each in pins for name in each.replaced()]
        for each in pins:
            each.state.unpin()
            each.state.parameters.look_at_toggles()
    if toggled:
        raise RuntimeError(
            f"rank {rank}: requires_grad was changed inside {caller}, of {', '.join(toggled)}. A "
            "chunk is trained or frozen as a whole, so this was undone. Use "
            "zero3.set_trainable(model, select), or requires_grad_ of a chunk."
        )
    if replaced:
        raise RuntimeError(
            f"rank {rank}: inside {caller}, {', '.join(replaced)} was replaced by another object. "
            "A sharded parameter stays one object for life, so this was undone: give it other "
            "values (parameter.data = values), with writeback=True."
        )
    if written:
        raise RuntimeError(
            f"rank {rank}: inside {caller}, the values of {named(written)} were changed{_UNDONE}"
        )


def _merged_adapters(model: nn.Module) -> dict[str, list[str]]:
    """Returns the merged adapters by peft's own notes. In bf16 a merge may change no value, and is
    wrong nevertheless if it is undone.
    """
    return {
        name: list(merged)
        for name, module in model.named_modules()
        if isinstance(merged := getattr(module, "merged_adapters", None), list) and merged
    }


@contextmanager
def resident(model: nn.Module) -> Iterator[None]:
    """Context for inference, in which all layers stay fetched and forwards make no collectives.

    So ranks may do different things inside: generate from other prompts, generate other lengths, or
    call the model more often. Every rank enters and leaves it, and holds the whole model inside.
    Parameters can be read under their own names, in the compute dtypes. torch.func's transforms
    (grad, vjp, jvp, vmap, jacrev, ...) work inside: they differentiate by their own arguments, and
    take parameters as constants. A backward of parameters alone, as of a penalty, is no error if
    every rank makes it: its gradients are reduced.

    Args:
        model: Any model that contains zero3 layers.

    Raises:
        RuntimeError: A backward runs through a forward that was made inside; an optimizer steps the
            model inside; or, at the end, parameters were changed inside, which is undone.
        ValueError: Nothing in `model` is sharded.

    Example::

        with zero3.resident(model), torch.no_grad():
            ids = model.generate(**prompt, max_new_tokens=4)
    """
    states = states_of(model)
    merged = _merged_adapters(model)
    stays = all(state.pinned or all(chunk.resident for chunk in state.chunks) for state in states)
    with pinned(states, "resident", "compute"):
        for runtime in runtimes_in(model):
            runtime.end_continuation()  # ranks may run different numbers of forwards from here on
        with transformable(states):
            yield
    changed = [
        name for name, adapters in _merged_adapters(model).items() if adapters != merged.get(name)
    ]
    if changed and not stays:
        raise RuntimeError(
            f"rank {states[0].communicator.rank}: inside resident, adapters were merged into "
            f"{named(changed)}{_UNDONE}"
        )


@contextmanager
def no_sync(model: nn.Module, *, replicas_only: bool = False) -> Iterator[None]:
    """Context for gradient accumulation, in which backwards do not reduce gradients.

    The first backward after it reduces the accumulated gradients. Every rank enters and leaves it.
    It saves all reductions except one, and costs memory: until that backward, every layer keeps its
    full gradient, `W * S` elements in `reduce_dtype`, or from the second one on in the dtype of
    `chunk.grad`, if that is wider. Results differ only by the order of sums, and by where they are
    rounded to `reduce_dtype`. If gradients are zeroed, kept ones are dropped. It may cover any
    module, and any part of a step.

    Args:
        model: Any model, or part of one, that contains zero3 layers.
        replicas_only: Each backward reduces inside its replica; only sums over replicas wait. A
            layer keeps `S` elements, not `W * S`.

    Raises:
        ValueError: Nothing in `model` is sharded.
        RuntimeError: It is inside of `step_guard`, which belongs inside of it.

    Example::

        for micro_batch in micro_batches[:-1]:
            with zero3.no_sync(model):
                loss_of(model, micro_batch).backward()
        loss_of(model, micro_batches[-1]).backward()
        optimizer.step()
    """
    gradients = [state.gradients for state in states_of(model)]
    if any(each.holds for each in gradients):
        raise CallersMistake(
            "zero3.no_sync inside zero3.step_guard: put no_sync around it (`with no_sync(model), "
            "step_guard(model):`)"
        )
    with ExitStack() as left:
        for each in gradients:
            each.defer(1, replicas_only=replicas_only)
            left.callback(each.defer, -1, replicas_only=replicas_only)
        yield


def agree_to_gather(states: list[LayerState], caller: str, error: Exception | None = None) -> None:
    """Compares the ranks before a gather outside a forward, so that no rank gathers alone, or
    another layer than the others.

    Raises:
        ValueError, RuntimeError: Ranks call different functions, or want different layers, or one
            passes an `error`.
    """
    _tell_of_use(states, caller)
    # pinned layers need no gather, so one rank may call this alone
    if not all(state.pinned for state in states):
        agree(states[0], caller, [state.name_among_ranks for state in states], error)
    elif error is not None:
        raise error


def reset(model: nn.Module) -> None:
    """Cleans a model up after an exception: releases every layer, and drops the step that failed.

    The next forward does the same by itself. Call this to free the memory at once. If a backward
    failed, the gradients accumulated before are dropped too (set to None). With `dynamic=True`,
    either makes the rest of that backward's transfers, so every rank calls it.

    Args:
        model: Any model that contains zero3 layers.

    Raises:
        RuntimeError: It is called inside a forward, or inside a backward, whose gradients would be
            wrong.
        ValueError: Nothing in `model` is sharded, or it is a part of a layer.

    Example::

        try:
            loss_of(model, batch).backward()
        except torch.OutOfMemoryError:
            zero3.reset(model)
    """
    layers = layers_of(_module(model))
    if not layers:
        raise inside_a_layer(model, states_of(model), "reset")
    if inside_backward():
        raise RuntimeError(
            f"rank {layers[0]._state.communicator.rank}: zero3.reset inside a backward (in a "
            "hook). The gradients that it has brought so far would be lost, without an error. "
            "Call it after the backward has ended or raised."
        )
    runtimes = runtimes_in(model)
    # an interrupt may leave a forward under way that no layer runs in any more
    if any(runtime.in_forward and runtime.stack.frames for runtime in runtimes):
        raise RuntimeError(
            f"rank {layers[0]._state.communicator.rank}: zero3.reset inside a forward, whose "
            "layers it would release. Call it after the forward has ended or raised."
        )
    _tell_of_use([layer._state for layer in layers], "reset")
    for runtime in runtimes:
        runtime.reset()
    for layer in layers:
        layer._state.reset()


def states_of(module: nn.Module, *, whole: bool = False) -> list[LayerState]:
    """The states of the layers in `module`, and of the layers that the parameters in `module`
    belong to. `whole`: what these train has to be in `module`.

    Raises:
        RuntimeError: They rest in files, and this is a forked child.
        ValueError: There are none, or they also train parameters of other modules.
    """
    own, lent = _found_in(module)
    if not (own or lent):
        raise ValueError(
            f"nothing in this {type(module).__name__} is sharded: wrap its layers in Zero3Layer "
            "first"
        )
    several = [state for state in own if state.behaviour.modules > 1]
    for state in [*lent, *several] if whole else ():
        _refuse_others(module, state)
    check_process([*own, *lent])
    return [*own, *lent]


def _refuse_other_ranks(states: list[LayerState]) -> None:
    """What is gathered, summed or written together is so among the ranks of the first one."""
    first, *others = [(state, unconducted(state.communicator)) for state in states]
    for state, communicator in others:
        if not divide_alike(first[1], communicator):
            one, other = (
                f"over {ranks.world_size // ranks.shards} x {ranks.shards}"
                for ranks in (first[1], communicator)
            )
            raise ValueError(
                f"layer {first[0].label} is sharded {one} ranks (replicas x shards), and layer "
                f"{state.label} {other} other ones, expected the same for all layers of a call: "
                "call it for each model, or shard them over one group or mesh"
            )


def inside_a_layer(module: nn.Module, states: list[LayerState], by: str) -> ValueError:
    """Returns the error of the function `by`, which takes whole layers, where `module` has none."""
    return ValueError(
        f"{by} of a {type(module).__name__} inside a layer, {states[0].label}: that is taken as a "
        "whole, pass it or the model"
    )


def _refuse_others(module: nn.Module, state: LayerState) -> None:
    """An optimizer or a norm of `module` would take parameters along that are in no module of
    it.
    """
    inside = set(plain_modules(module))
    trained = [each.sites for each in state.parameters if each.chunk.shard.requires_grad]
    others = [s.name for s in trained if all(place not in inside for place, _ in s.places)]
    if others:
        raise ValueError(
            f"this {type(module).__name__} is a part of a sharded model, and shares a chunk of "
            f"layer {state.label} with {named(others)}, outside of it: what steps or clips the "
            "part would do that to these too. Pass the whole model, whose parameters "
            "zero3.param_groups(model, ...) divides by their names, or shard each part by itself"
        )


def left_out(states: list[LayerState]) -> list[LayerState]:
    """Layers that train, of the same models, as far as these have computed."""
    backwards = dict.fromkeys(state.gradients.backward() for state in states)
    inside = set(states)
    return [
        other
        for backward in backwards
        if backward is not None
        for other in backward.layers
        if other not in inside and other.chunks.trainable()
    ]


def only_a_part(caller: str, other: LayerState) -> str:
    """The mistake where `caller` has to do the same to the gradients of all layers."""
    return (
        f"{caller} got only a part of the model: layer {other.label} trains too. Pass the whole one"
    )


def tell_of_outsiders(model: nn.Module, states: list[LayerState]) -> None:
    """Warns of parameters that train and are in no layer, once a model."""
    if not steps_seen().warns_first_of(states[0]):
        return
    names = [
        name
        for name, each in model.named_parameters()
        if each.requires_grad and state_of(each) is None and ignored_by(each) is None
    ]
    if names and is_first(states[0].communicator):
        _log.warning(
            "%s: these parameters train, and are in no layer. zero3 does not average their "
            "gradients over ranks, count them in norms, or give them to the optimizer. Wrap the "
            "model in a Zero3Layer too, or call zero3.shard(model), or freeze them. What averages "
            "them otherwise, such as DDP, clips and steps them itself",
            named(names),
        )


def sharded_in(states: Iterable[LayerState]) -> dict[int, ShardedParameter]:
    """The parameters of these layers, by their ids."""
    return {id(each.sites.parameter): each for state in states for each in state.parameters}


def used(module: nn.Module, by: str) -> list[LayerState]:
    """As `states_of`, for the function `by`, which uses values, or moves any. Conductors hear
    of it first: one may finish what was begun, or refuse.
    """
    states = states_of(module)
    _tell_of_use(states, by)
    return states


def used_together(module: nn.Module, by: str, *, whole: bool = False) -> list[LayerState]:
    """As `used`, where `by` takes all layers to be cut over the same ranks. `whole`: as for
    `states_of`.

    Raises:
        ValueError: As `states_of`; or they are cut over different ranks.
    """
    states = states_of(module, whole=whole)
    _refuse_other_ranks(states)
    _tell_of_use(states, by)
    return states


def used_in_step(model: nn.Module, by: str, *, whole: bool = False) -> list[LayerState]:
    """As `used`, for what is called in each step. It tells what it leaves out."""
    states = used_together(model, by, whole=whole)
    tell_of_outsiders(model, states)
    return states


def _tell_of_use(states: list[LayerState], by: str) -> None:
    states[0].conductor.conduct(Use(states[0], by))


def _module(given: object) -> nn.Module:
    # callers may pass parameters, as to torch's own clip_grad_norm_
    if not isinstance(given, nn.Module):
        raise TypeError(
            f"expected the sharded model, an nn.Module, found a {type(given).__name__}: pass the "
            "model, not its parameters"
        )
    return given


def _found_in(module: nn.Module) -> tuple[list[LayerState], list[LayerState]]:
    """The states of its own layers, and of others' that have parameters in it."""
    roots = (vars(inner).get("_zero3_root") for inner in _module(module).modules())
    own = [*states_in(module), *(root for root in roots if isinstance(root, LayerState))]
    lent: list[LayerState] = []
    for inner in plain_modules(module):
        for value in [*vars(inner).values(), *inner._parameters.values()]:
            if (
                isinstance(value, nn.Parameter)
                and (state := state_of(value)) is not None
                and state not in own
                and state not in lent
            ):
                lent.append(state)
    return own, lent
