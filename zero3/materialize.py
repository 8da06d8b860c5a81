"""materialize(): gives a model that was sharded on the meta device its first values, as one process
would draw them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import nn

from .access import used
from .checkpoint.contents import check_released
from .checkpoint.meta_buffers import hooks_of, initialise, twin
from .checkpoint.random_state import generators, restore
from .comm.agreement import agree, agreeing
from .comm.communicator import is_first
from .core.layer_state import LayerState, chunks_of
from .initial_values import Command, Commands, Hand, Others
from .modules import named, plain_modules

__all__: list[str] = []

Init = Callable[[nn.Module], Any]


def materialize(model: nn.Module, init: Init | None = None) -> None:
    """Initialises a model that was built and sharded on the meta device, layer by layer. So
    pretraining needs no checkpoint.

    The values are those of the unsharded model on one process that is initialised in the same way
    with the same seed, whatever the number of ranks. Rank 0 draws them, from torch's global
    generator, on the layer's device, in memory for one layer: the parameters of other layers are
    sent to their ranks, and fetched again if a module's initialisation comes back to them. Where
    all ranks have seeded torch alike, they go on with the generator as rank 0 leaves it. With
    `master_dtype` it draws in that dtype: the values are those of the model in it.

    Parameters that have values already keep them. A tied parameter is drawn in each of its places,
    and the last draw counts.

    Every rank calls it. Rank 0 calls the functions that initialise, with modules that stand in for
    those of the model: what they set besides parameters and buffers is lost.

    Args:
        model: Any model that contains zero3 layers.
        init: Called for each module as `nn.Module.apply` would, children first. It changes the
            module's parameters in place. None calls `_init_weights` of transformers models
            likewise, and `reset_parameters` of all other modules that have it, in the order of
            `modules()`. peft's LoRA adapters then begin as peft begins them.

    Raises:
        ValueError: Nothing in `model` is sharded, it has a part of a layer, or a parameter is not
            initialised by anything; on every rank. Then no parameter that was on the meta device
            has a value.
        TypeError: `init` is no function; on every rank.
        RuntimeError: The model is inside `full_params` or `resident`, or `init` has raised; on
            every rank.

    Example::

        with torch.device("meta"):
            new = AutoModelForCausalLM.from_config(config)
        zero3.shard(new, device=device)
        torch.manual_seed(0)
        zero3.materialize(new)
    """
    states = used(model, "materialize")
    first = states[0]
    told = Commands(states)
    with agreeing(first, "materialize") as lines:
        lines += [state.name_among_ranks for state in states]
        _check(model, states, init)
    tensors, unseeded = generators(first.device)
    digest = hashlib.sha256(
        b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    ).digest()
    seeded_alike = len(set(first.communicator.exchange(digest, first.device))) == 1
    for state in states:
        state.release()  # what is still fetched, after a forward, is about to be old
    others = Others(model, states)
    error: Exception | None = None
    if is_first(first.communicator):
        try:
            _draw(model, states, init, told, others)
        except Exception as caught:  # whatever it is, the others wait to hear of it
            error = caught
        told.tell(Command.END)
    else:
        told.listen()
    agree(first, "what materialize has drawn", [], error)
    for chunk in chunks_of(states):
        chunk.unloaded.clear()
        torch.autograd.graph.increment_version(chunk.shard)  # graphs built before are stale
    others.spread()
    for _, value in initialise(model, states):
        first.communicator.broadcast(value)
    if seeded_alike:
        _share_generators(first, unseeded)


def _check(model: nn.Module, states: Sequence[LayerState], init: Any) -> None:
    if init is not None and not callable(init):
        raise TypeError(
            f"init must be a function of a module, or None, found a {type(init).__name__}"
        )
    check_released(states, "materialize")
    inside = set(plain_modules(model))
    outside = [
        each.sites.name
        for state in states
        for each in state.parameters
        if any(place not in inside for place, _ in each.sites.places)
    ]
    if outside:
        raise ValueError(
            f"materialize of a {type(model).__name__}, a part of a sharded model whose layers have "
            f"{named(outside)} outside of it, and are drawn as a whole. Pass the whole model: "
            "parameters that have values keep them"
        )


def _share_generators(first: LayerState, unseeded: str) -> None:
    """All ranks go on with rank 0's generators, as if each had drawn. `unseeded`: Python's and
    numpy's, which stay.
    """
    tensors, _ = generators(first.device)
    sent = {name: state.to(first.device) for name, state in tensors.items()}
    for state in sent.values():
        first.communicator.broadcast(state)
    if not is_first(first.communicator):
        restore(first.device, {name: state.cpu() for name, state in sent.items()}, unseeded)


def _draw(
    model: nn.Module,
    states: Sequence[LayerState],
    init: Init | None,
    told: Commands,
    others: Others,
) -> None:
    copies: dict[nn.Module, nn.Module] = {}
    root = twin(model, copies)
    hand = Hand(states, copies, told)
    others.lend(copies)
    with torch.no_grad(), hand:
        for module, function in _calls(root, init):
            function(module)
    hand.empty()
    others.take_back()
    if bare := [*hand.bare(), *others.bare]:
        raise ValueError(
            f"nothing has initialised {named(bare)}: no reset_parameters (or _init_weights of a "
            "transformers model) has given each element a value. Pass init=, a function that is "
            "called for each module and fills its parameters in place. The model has no values "
            "yet."
        )


def _calls(module: nn.Module, init: Init | None) -> Iterator[tuple[nn.Module, Init]]:
    """Which module is initialised by which function, in this order."""
    hooks: Mapping[nn.Module, Init] = hooks_of(module) if init is None else {}
    seen: set[nn.Module] = set()

    def children_first(inner: nn.Module) -> Iterator[tuple[nn.Module, Init]]:
        for child in inner.children():
            yield from children_first(child)
        yield inner, init or hooks[inner]

    def in_order(inner: nn.Module) -> Iterator[tuple[nn.Module, Init]]:
        if inner in hooks:
            yield from children_first(inner)
        elif inner not in seen:
            seen.add(inner)
            if callable(getattr(inner, "reset_parameters", None)):
                yield inner, methodcaller("reset_parameters")
            for child in inner.children():
                yield from in_order(child)

    yield from in_order(module) if init is None else children_first(module)
    if init is None:
        yield from _adapters_in(module)


def _adapters_in(model: Any) -> Iterator[tuple[nn.Module, Init]]:
    """peft's modules with adapters, which begin as peft begins them: after the layers that they
    hold have drawn their own values.
    """
    configs: Any = getattr(model, "peft_config", None)

    def begin(module: Any) -> None:
        for adapter in [*module.lora_A, *module.lora_embedding_A]:
            module.reset_lora_parameters(adapter, configs[adapter].init_lora_weights)

    for module in model.modules() if isinstance(configs, dict) else ():
        if callable(getattr(module, "reset_lora_parameters", None)):
            yield module, begin
