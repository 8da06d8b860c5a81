"""shard(): any model, in place. Its blocks become layers, what is left becomes the root's own layer."""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from .binding import Binding, own_modules
from .construction import Request, build_state
from .layer import Zero3Layer, adopt, is_layer, layers_of, run_sharded
from .layer_state import LayerState
from .policy import ShardingPolicy
from .runtime import Runtime

__all__: list[str] = []

_log = logging.getLogger("zero3")

Layers = type[nn.Module] | Sequence[type[nn.Module] | nn.Module] | Callable[[str, nn.Module], bool] | None
M = TypeVar("M", bound=nn.Module)


def shard(
    model: M,
    layers: Layers = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    policy: ShardingPolicy = ShardingPolicy(),  # noqa: B008 (frozen)
    process_group: Any = None,
) -> M:
    """Shards `model` in place, whatever its class; it goes on being called, and generating, as before.

        model = zero3.shard(AutoModelForCausalLM.from_config(config))
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))

    Args:
        layers: which submodules become layers: a class, several classes or modules, or a predicate `(name, module) -> bool`.
            A match inside a match becomes an inner layer. None: the elements of the `ModuleList`s that hold most
            parameters (of the outermost ones: an encoder's and a decoder's), untied token embeddings, and heads.
        rank, world_size, device, dtype, policy, process_group: as for `Zero3Layer`.

    A parameter that stands in several layers (tied), and everything outside of them, belongs to the root's own layer. It
    is fetched when the model is called, and kept to the end of backward. One line of the log ("zero3", INFO) says what became what.

    Raises:
        ValueError: no layers found or named; what `Zero3Layer` refuses.
        TypeError: `layers` is none of the above.
    """
    if layers_of(model):
        raise ValueError(f"this {type(model).__name__} is sharded already, or holds Zero3Layers: shard a model once, before wrapping any part of it")
    chosen = _choose(model, layers)
    common = Request(model, rank, world_size, device, dtype, policy, process_group)
    tied = _tied_across(model, chosen)
    elsewhere = frozenset(tied)
    for name, module in reversed(chosen):  # inner before outer
        request = replace(common, module=module, label=f"{name!r} ({type(module).__name__})", elsewhere=elsewhere)
        _put(model, module, Zero3Layer.from_request(request))
    label = f"the root ({type(model).__name__})"
    root = build_state(replace(common, label=label, borrowed=tuple(tied.values())), is_layer)
    root.registry = model._parameters
    model._parameters.update(root.chunk_names())
    entry = _Root(root, model)
    for _, container in own_modules(model, is_layer):
        if not isinstance(container, (nn.ModuleList, nn.ModuleDict)):
            container.forward = entry.wrap(container)
    _report(model, root)
    return model


class _Root:
    """Makes any module outside the layers an entry to the model: it runs with the root's own layer fetched.

    Models are not only called as a whole: generation calls an encoder by itself, users call `model.get_decoder()`.
    """

    def __init__(self, state: LayerState, model: nn.Module) -> None:
        self._state = weakref.ref(state)
        self._runtime: weakref.ref[Runtime] = weakref.ref(adopt(model, ordered=False, outer=[state]))  # its layers hold it

    def wrap(self, module: nn.Module) -> Callable[..., Any]:
        """A forward for `module` to have as its own attribute. It holds nothing: a cycle would keep a deleted model's memory."""
        own, plain = vars(module).get("forward"), type(module).forward
        this, state, runtime = weakref.ref(module), self._state, self._runtime

        @functools.wraps(own or plain)
        def sharded_forward(*args: Any, **kwargs: Any) -> Any:
            found, root, present = this(), state(), runtime()
            if found is None or root is None or present is None:
                raise RuntimeError(f"the model that this {plain.__qualname__} belongs to is gone")
            forward = own or functools.partial(plain, found)
            if present.is_running(root):
                return forward(*args, **kwargs)
            return run_sharded(present, root, found, forward, args, kwargs)

        sharded_forward.__signature__ = inspect.signature(module.forward)  # type: ignore[attr-defined]  # without self
        return sharded_forward


Chosen = list[tuple[str, nn.Module]]


def _choose(model: nn.Module, layers: Layers) -> Chosen:
    """The modules that become layers, each once, outer before inner; never the model itself."""
    named = [(name, module) for name, module in model.named_modules() if module is not model]
    if layers is None:
        return _choose_by_size(model, named)
    if isinstance(layers, type):
        layers = [layers]
    if isinstance(layers, Iterable):
        wanted = list(layers)
        wrong = [item for item in wanted if not isinstance(item, (type, nn.Module))]
        if wrong:
            raise TypeError(f"layers holds a {type(wrong[0]).__name__}, expected module classes or modules")
        classes = tuple(item for item in wanted if isinstance(item, type))
        identities = {id(item) for item in wanted if not isinstance(item, type)}
        chosen = [(name, module) for name, module in named if isinstance(module, classes) or id(module) in identities]
        missing = identities - {id(module) for _, module in named}
        if missing:
            raise ValueError("layers holds a module that is no submodule of the model")
    elif callable(layers):
        chosen = [(name, module) for name, module in named if layers(name, module)]
    else:
        raise TypeError(f"layers must be a module class, several, modules, or a predicate (name, module) -> bool; found {type(layers).__name__}")
    if not chosen:
        raise ValueError(f"layers={layers!r} names no submodule of this {type(model).__name__}")
    return chosen


def _choose_by_size(model: nn.Module, named: Chosen) -> Chosen:
    lists = _outermost_lists(named)
    sizes = [(sum(p.numel() for p in module.parameters()), name, module) for name, module in lists]
    total = sum(p.numel() for p in model.parameters())
    big = {name for size, name, _ in sizes if size and size * 10 >= total} or {max(sizes)[1]} if any(s[0] for s in sizes) else set()
    if not big:
        raise ValueError(f"no ModuleList of this {type(model).__name__} holds parameters, so its blocks are unknown: name them with layers=")
    blocks = {id(element): element for name, module in lists if name in big for element in module}
    counts: dict[int, int] = {}
    for _, module in model.named_modules(remove_duplicate=True):
        for parameter in module._parameters.values():
            if parameter is not None:
                counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    ends = [module for module in _ends(model, named) if all(counts[id(p)] == 1 for p in module.parameters())]
    inside = {id(inner) for block in blocks.values() for inner in block.modules()}
    wanted = {id(end) for end in ends if id(end) not in inside} | set(blocks)
    return [(name, module) for name, module in named if id(module) in wanted]


def _outermost_lists(named: Chosen) -> list[tuple[str, nn.ModuleList]]:
    lists: list[tuple[str, nn.ModuleList]] = []
    for name, module in named:  # outer before inner
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer, _ in lists):
            lists.append((name, module))
    return lists


def _ends(model: nn.Module, named: Chosen) -> list[nn.Module]:
    """Token embeddings and heads: what a transformers model says they are, or embeddings anywhere; linear layers right under the model."""
    ends: list[nn.Module | None] = [module for module in model.children() if type(module) is nn.Linear]
    if hasattr(model, "get_input_embeddings"):
        ends += [_ask(model.get_input_embeddings), _ask(getattr(model, "get_output_embeddings", None))]
    else:
        ends += [module for _, module in named if type(module) is nn.Embedding]
    return [end for end in ends if end is not None and next(end.parameters(recurse=True), None) is not None]


def _ask(getter: Any) -> nn.Module | None:
    try:
        answer = getter() if getter is not None else None
    except (NotImplementedError, AttributeError):
        return None
    return answer if isinstance(answer, nn.Module) else None


def _tied_across(model: nn.Module, chosen: Chosen) -> dict[int, Binding]:
    """Parameters that stand in more than one layer (the root counts as one), with all their places, under their first names."""
    boundaries = {id(module) for _, module in chosen}
    units: dict[int, set[int]] = {}
    bindings: dict[int, Binding] = {}
    for unit_name, unit in [("", model), *chosen]:
        for name, module in own_modules_of_unit(unit, boundaries, unit_name):
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    units.setdefault(id(parameter), set()).add(id(unit))
                    full_name = f"{name}.{attribute}" if name else attribute
                    binding = bindings.setdefault(id(parameter), Binding(full_name, parameter))
                    if (module, attribute) not in binding.sites:
                        binding.sites.append((module, attribute))
    return {key: bindings[key] for key, found in units.items() if len(found) > 1}


def own_modules_of_unit(unit: nn.Module, boundaries: set[int], prefix: str) -> list[tuple[str, nn.Module]]:
    return list(own_modules(unit, lambda module: module is not unit and id(module) in boundaries, prefix))


def _put(model: nn.Module, module: nn.Module, layer: Zero3Layer) -> None:
    """`layer` takes every place in the model that `module` has (several, if it is shared)."""
    for owner in list(model.modules()):
        if owner is layer:
            continue
        for name, child in owner._modules.items():
            if child is module:
                owner._modules[name] = layer


def _report(model: nn.Module, root: LayerState) -> None:
    states = [layer._state for layer in layers_of(model)]
    kinds: dict[str, list[int]] = {}
    for layer in layers_of(model):
        kinds.setdefault(type(layer.module).__name__, []).append(layer._state.full_nbytes())
    parts = ", ".join(f"{len(sizes)} x {kind} (each up to {_megabytes(max(sizes))})" for kind, sizes in kinds.items())
    own, largest = root.full_nbytes(), max(state.full_nbytes() for state in states)
    if root.communicator.rank == 0:
        names = [bound.binding.name for bound in root.bound]
        _log.info("%s: %s; in the root's own layer %s (%s)", type(model).__name__, parts, _megabytes(own), ", ".join(names[:6]) + (" ..." if len(names) > 6 else ""))
        if own > largest:
            _log.warning(
                "%s: the root's own layer holds %s, more than the largest layer (%s), from the forward to the end of backward. "
                "Name more submodules in layers=, or untie what is tied (%s).",
                type(model).__name__, _megabytes(own), _megabytes(largest), ", ".join(names[:6]),
            )  # fmt: skip


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
