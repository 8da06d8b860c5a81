"""By hand: fetch and release layers, tell their order before it is learned, and reduce gradients
that are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from torch import nn

from .access import inside_a_layer, used
from .comm.agreement import agreeing
from .core.autograd import inside_backward
from .core.layer_state import LayerState, Presence
from .layer import layers_of, runtimes_in

__all__: list[str] = []


def fetch(module: nn.Module) -> None:
    """Gathers the layers of a module now, and keeps them fetched until `release`.

    Forwards and backwards then make no gathers for these layers, except after their parameters have
    changed: to find that out, each forward compares one byte for each of them between ranks, and
    the host waits, as with `stage=2`. Outside of compute the parameters stay hidden. To read them,
    use `full_params`; to compute outside of a forward, `resident`.

    Every rank calls it. On a GPU the host does not wait for the gathers.

    Args:
        module: A sharded model, a layer, or any module that holds layers.

    Raises:
        ValueError: `module` holds no layer, or ranks fetch different layers; on every rank.
        RuntimeError: A layer computes, or is inside `full_params` or `resident`, or has no values
            yet; on every rank.

    Example::

        zero3.fetch(model.blocks[0])    # its gather runs while the batch is made
        loss_of(model, batch).backward()
        zero3.release(model.blocks[0])
    """
    states = _agreed(module, "fetch")
    for state in states:
        state.release()  # what is kept may be older than the last optimizer step
    for state in states:
        state.start_fetch()
    for state in states:
        state.finish_fetch()
        state.keep_whole()
    _tell_runtimes(module)


def release(module: nn.Module) -> None:
    """Gives back the memory of a module's full parameters now, and ends what `fetch` began.

    Layers are gathered again when they compute next, in a backward too. Every rank calls it.

    Args:
        module: A sharded model, a layer, or any module that holds layers.

    Raises:
        ValueError: `module` holds no layer, or ranks release different layers; on every rank.
        RuntimeError: A layer computes, or is inside `full_params` or `resident`; on every rank.

    Example::

        with torch.no_grad():
            model(batch)
        zero3.release(model)
    """
    for state in _agreed(module, "release"):
        state.release_whole()
    _tell_runtimes(module)


def set_forward_order(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Tells in which order the next forward will call the layers, so that it fetches ahead without
    having seen one.

    It is needed for the first forward alone, and for one that calls layers in a new order: orders
    are learned. If the forward calls other layers than this, its results are right too, ranks
    compare the calls, and the order is forgotten. How many layers are fetched ahead is the policy's
    `prefetch_depth`. Every rank calls it.

    Args:
        model: A model that `shard` has sharded. (A `Zero3Sequential` knows its order.)
        layers: Its layers in the order of calls. A layer that is called twice stands twice. The
            root's own layer is left out: it is always the first.

    Raises:
        ValueError: Nothing in `model` is sharded, an item is no layer of it, or ranks pass
            different orders; on every rank.
        TypeError: `layers` is no list; on every rank.

    Example::

        zero3.set_forward_order(model, [model.embedding, *model.blocks, model.head])
    """
    states = used(model, "set_forward_order")
    known = {id(layer): layer._state for layer in layers_of(model)}
    runtimes = runtimes_in(model)
    root = vars(model).get("_zero3_root")
    order: list[LayerState] = []
    with agreeing(states[0], "set_forward_order") as lines:
        if not isinstance(cast(object, layers), Iterable):
            found = type(layers).__name__
            raise TypeError(f"set_forward_order: layers must be a list of modules, found a {found}")
        model_kind = type(model).__name__
        for layer in layers:
            if id(layer) not in known:
                wrong = type(layer).__name__
                raise ValueError(f"set_forward_order: a {wrong} is no layer of this {model_kind}")
            order.append(known[id(layer)])
        if root is None or len(runtimes) != 1:
            raise ValueError(
                f"set_forward_order: this {model_kind} is not what zero3.shard has sharded"
            )
        lines += [state.name_among_ranks for state in order]
    calls = runtimes[0].orders[0]
    calls.expect([(root, *order), *calls.known])


def reduce_gradients(model: nn.Module) -> None:
    """Reduces the gradients that backwards inside `no_sync` have kept, without a further backward.

    So all micro-batches may run inside `no_sync`. Every rank calls it, outside of `no_sync` and
    before clipping. Where nothing is kept, it does nothing. What a backward that raised has left is
    dropped, as at the next forward.

    Args:
        model: Any model that contains zero3 layers.

    Raises:
        ValueError: Nothing in `model` is sharded, it is a part of a layer, or ranks have kept
            gradients of different layers; on every rank.
        RuntimeError: It is called inside `no_sync` or inside a backward; on every rank.

    Example::

        with zero3.no_sync(model):
            for micro_batch in micro_batches:
                loss_of(model, micro_batch).backward()
        zero3.reduce_gradients(model)
        optimizer.step()
    """
    states = used(model, "reduce_gradients")
    runtimes = runtimes_in(model)
    for runtime in runtimes:
        runtime.reset(broken=False) if runtime.backward.raised else runtime.backward.forget_zeroed()
    with agreeing(states[0], "reduce_gradients") as lines:
        if not layers_of(model):
            raise inside_a_layer(model, states, "reduce_gradients")
        if inside_backward():
            raise RuntimeError(
                "zero3.reduce_gradients inside a backward (in a hook): call it after"
            )
        for state in states:
            if not state.gradients.may_reduce:
                raise RuntimeError(
                    f"reduce_gradients inside no_sync, which covers layer {state.label}: leave it "
                    "first"
                )
        lines += [state.name_among_ranks for state in states if state.gradients.owed()]
    for runtime in runtimes:
        runtime.backward.reduce_deferred()
    for state in states:
        state.gradients.end_backward()


def _agreed(module: nn.Module, caller: str) -> list[LayerState]:
    states = used(module, caller)
    with agreeing(states[0], caller) as lines:
        if not layers_of(module):
            raise inside_a_layer(module, states, caller)
        for state in states:
            if state.presence in (Presence.FETCHED, Presence.FETCHING):
                where = "is inside full_params or resident" if state.pinned else "computes"
                raise RuntimeError(
                    f"{caller} of layer {state.label}, which {where}: call it between forwards and "
                    "backwards, and outside of these; after an exception, call zero3.reset(model) "
                    "first"
                )
            lines.append(state.name_among_ranks)
    return states


def _tell_runtimes(module: nn.Module) -> None:
    for runtime in runtimes_in(module):
        runtime.note_lifetimes()
