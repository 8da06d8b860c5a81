"""shard(): any model, in place. Its blocks become layers, what is left becomes the root's own layer."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from .access import pinned
from .auto_wrap import Layers, choose, tied_across
from .core.construction import Request, agree_on, build_state, device_of
from .core.layer_state import LayerState
from .core.layout import megabytes
from .core.module_overrides import Override, guard
from .core.parameters import check_parameters, find_parameters, is_callable, own_modules
from .core.runtime import Runtime
from .layer import Zero3Layer, adopt, is_layer, layers_of, run_sharded
from .policy import ShardingPolicy

__all__: list[str] = []

_log = logging.getLogger("zero3")

M = TypeVar("M", bound=nn.Module)
PolicyOf = Callable[[str, nn.Module], ShardingPolicy]


def shard(
    model: M,
    layers: Layers = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    policy: ShardingPolicy | PolicyOf = ShardingPolicy(),  # noqa: B008 (frozen)
    process_group: Any = None,
) -> M:
    """Shards `model` in place, whatever its class; it goes on being called, and generating, as before.

        model = zero3.shard(AutoModelForCausalLM.from_config(config))
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))

    Args:
        layers: which submodules become layers: a class, several classes or modules, or a predicate `(name, module) -> bool`.
            A match inside a match becomes an inner layer, and is not held while the rest of the outer one computes. None:

            * blocks: the elements of every `ModuleList` that lies in no other and holds a tenth of the parameters or more
              (of the largest one if none does), and then of all that hold a tenth as much as the largest block: an encoder's,
              a decoder's, a vision tower's. An element that is never called itself, such as a list, gives what it holds;
            * ends: what `get_input_embeddings()` and `get_output_embeddings()` return, or without these every
              `nn.Embedding`; every one of half a block's size; and each `nn.Linear` right under the model. Unless they are in
              a block, or tied;
            * further modules, the largest first, until the root's own layer is no larger than the largest block.

        policy: one for all layers, of which the root alone casts its output; or `(name, module) -> ShardingPolicy`, asked
            for every layer, and for the root with the name "" (its prefetch_depth and separate_backup_group count for all).
        rank, world_size, device, dtype, process_group: as for `Zero3Layer`; the whole model computes on one device.

    A parameter that stands in several layers (tied), and everything outside of them, belongs to the root's own layer. It is
    fetched when the model, or a module outside the layers, is called, and kept to the end of backward. One line of the log
    ("zero3", INFO) says what became what; a warning, if the root's own layer is larger than any other.

    Raises:
        ValueError: no layers found or matched; a model that is sharded already; what `Zero3Layer` refuses.
        TypeError: `layers` is none of the above, or `model` no module.
        RuntimeError: as for `Zero3Layer`. Every rank raises the same error, and then nothing has changed.
    """
    one = policy if isinstance(policy, ShardingPolicy) else ShardingPolicy()
    common = Request(model, rank, world_size, device, dtype, one, process_group, label=f"the root ({type(model).__name__})")
    plan = _agreed_plan(common, layers, policy)
    for request in plan.layers:
        _put(model, request.module, Zero3Layer.from_request(request))
    root = build_state(plan.root, is_layer)
    _Root(root, model)
    _report(model, root)
    return model


@dataclass(frozen=True, slots=True)
class _Plan:
    layers: list[Request]  # inner before outer
    root: Request


def _agreed_plan(common: Request, layers: Layers, policy: ShardingPolicy | PolicyOf) -> _Plan:
    """What becomes of each part of the model, found to be possible on every rank before anything changes."""
    error: Exception | None = None
    plan = _Plan([], common)
    try:
        plan = _with_policies(_plan(common, layers), policy)
    except (TypeError, ValueError) as caught:
        error = caught
    own = {id(request.module) for request in plan.layers}
    agree_on([plan.root, *plan.layers], lambda module: is_layer(module) or id(module) in own, error)
    return plan


def _plan(common: Request, layers: Layers) -> _Plan:
    model = common.module
    common = replace(common, device=device_of(common, lambda module: False))
    if layers_of(model):
        raise ValueError(
            f"this {type(model).__name__} is sharded already, or holds Zero3Layers: shard a model once, before wrapping any part of it"
        )
    everything = find_parameters(model, lambda module: False)  # for parameters may overlap across layers
    check_parameters(everything, common.dtype, type(model).__name__)
    chosen = choose(model, layers)
    ids = {id(module) for _, module in chosen}
    tied = tied_across(model, chosen)
    elsewhere = frozenset(tied)
    parts = [replace(common, module=m, label=f"{name!r} ({type(m).__name__})", elsewhere=elsewhere) for name, m in chosen]
    parts.sort(key=lambda part: sum(id(inner) in ids for inner in part.module.modules()))  # a shared one may lie in several
    return _Plan(parts, replace(common, borrowed=tuple(tied.values())))


def _with_policies(plan: _Plan, policy: ShardingPolicy | PolicyOf) -> _Plan:
    if isinstance(policy, ShardingPolicy):
        inner = replace(policy, output_dtype=None)
        return _Plan([replace(part, policy=inner) for part in plan.layers], replace(plan.root, policy=policy))
    if not callable(policy):
        raise TypeError(f"policy must be a zero3.ShardingPolicy or (name, module) -> ShardingPolicy, found {type(policy).__name__}")
    names = {id(module): name for name, module in plan.root.module.named_modules()}
    return _Plan(
        [replace(part, policy=policy(names[id(part.module)], part.module)) for part in plan.layers],
        replace(plan.root, policy=policy("", plan.root.module)),
    )


def _put(model: nn.Module, module: nn.Module, layer: Zero3Layer) -> None:
    """`layer` takes every place in the model that `module` has (several, if it is shared)."""
    for owner in list(model.modules()):
        for name, child in owner._modules.items():
            if child is module and owner is not layer:
                owner._modules[name] = layer


class _Root:
    """The model's own layer, and what makes every module outside the layers an entry to the model.

    Models are not only called as a whole: generation calls an encoder by itself, users call `model.get_decoder()`. So each
    of these modules runs with the root's own layer fetched.
    """

    def __init__(self, state: LayerState, model: nn.Module) -> None:
        state.registry = model._parameters
        model._parameters.update(state.chunk_names())
        model.__dict__["_zero3_root"] = state
        self._state = weakref.ref(state)
        self._runtime: weakref.ref[Runtime] = weakref.ref(adopt(model, ordered=False, outer=[state]))  # its layers hold it
        for _, module in own_modules(model, is_layer):
            guard(module, is_layer, lists_chunks=module is model)
            if is_callable(module):
                Override(module, "forward", self._forward)
            if callable(getattr(type(module), "generate", None)):
                Override(module, "generate", self._generate)

    def _forward(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state, runtime = self._state(), self._runtime()
        if state is None or runtime is None:
            raise RuntimeError(f"the sharded model that this {type(module).__name__} belongs to is gone")
        if runtime.is_running(state):
            return forward(*args, **kwargs)
        return run_sharded(runtime, state, module, forward, args, kwargs)

    def _generate(self, module: nn.Module, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Between its forwards generation reads parameters (image tokens, say): so the root's own layer stays fetched through all of it."""
        state = self._state()
        if state is None:
            raise RuntimeError(f"the sharded model that this {type(module).__name__} belongs to is gone")
        with pinned([state], "generate", to_compute=True):
            return generate(*args, **kwargs)


def _report(model: nn.Module, root: LayerState) -> None:
    if root.communicator.rank != 0:
        return
    kinds: dict[str, list[int]] = {}
    for layer in layers_of(model):
        kinds.setdefault(type(layer.module).__name__, []).append(layer._state.full_nbytes())
    parts = ", ".join(f"{len(sizes)} x {kind} (each up to {megabytes(max(sizes))})" for kind, sizes in kinds.items())
    own, largest = root.full_nbytes(), max(max(sizes) for sizes in kinds.values())
    names = [sharded.sites.name for sharded in root.parameters]
    listed = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "") if names else "nothing"
    _log.info("%s: %s; in the root's own layer %s (%s)", type(model).__name__, parts, megabytes(own), listed)
    if own > largest:
        _log.warning(
            "%s: the root's own layer holds %s, more than the largest layer (%s), from the forward to the end of backward. "
            "Name more submodules in layers=, or untie what is tied (%s).",
            type(model).__name__, megabytes(own), megabytes(largest), listed,
        )  # fmt: skip
