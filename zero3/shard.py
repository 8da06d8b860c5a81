"""shard(): shards any model in place. Its blocks become layers, and all other parameters the root's
own layer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from .access import pinned, resident
from .auto_wrap import Candidate, Layers, choose, few_that_train, tied_across
from .build.construction import Request, agree_on, all_but, build_state, device_of
from .build.selecting import formats_of, without_ignored
from .build.with_experts import with_experts
from .comm.communicator import is_first
from .comm.factory import host_communicator, make_groups, parts_over
from .core.layer_state import LayerState
from .core.layout import megabytes
from .core.parameters import parameters_of
from .core.sites import ParameterSites
from .guards.compiled import check_compiled
from .guards.module_overrides import Override, guard, refuse_merges
from .guards.unshardable import check_modules, check_parameters
from .guards.wrappers import refuse_ulysses
from .layer import Zero3Layer, adopt, enter_root, is_layer, layers_of, put
from .modules import (
    find_parameters,
    is_callable,
    own_module_name,
    own_modules,
    plain_modules,
    unwrapped,
)
from .policy import ShardingPolicy, unlike
from .quantized.configured import configured_in
from .sequences.dividing import check_dividable, divide_sequences
from .towers.choosing import Optional, choose_towers
from .towers.entering import own_layers, put_gates
from .towers.gates import Gates

__all__: list[str] = []

_log = logging.getLogger("zero3")
_REFUSED_ADAPTERS = MappingProxyType(
    {
        "ADALORA": (
            "reads all of its parameters after the forward, for its loss, and their "
            "gradients between steps"
        ),
        "CPT": "gives its parameter other values in each forward",
    }
)
# what makes the output of embeddings need gradients: transformers' name of the method, and
# transformers' and peft's names of the hooks
_ENABLE_GRADIENTS = "enable_input_require_grads"
_GRADIENT_HOOKS = ("make_inputs_require_grads", "make_inputs_require_grad")
# of transformers
_CONTINUOUS_BATCHING = (
    "generate_batch",
    "init_continuous_batching",
    "continuous_batching_context_manager",
)

M = TypeVar("M", bound=nn.Module)
PolicyOf = Callable[[str, nn.Module], ShardingPolicy]


def shard(
    model: M,
    layers: Layers = None,
    *,
    optional: Optional = None,
    rank: int | None = None,
    world_size: int | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    policy: ShardingPolicy | PolicyOf = ShardingPolicy(),  # noqa: B008 (frozen)
    process_group: Any = None,
) -> M:
    """Shards any model in place. The model keeps its class, its configuration and its methods, such
    as `generate`.

    Some submodules become layers, each a `Zero3Layer`. All other parameters, and tied parameters of
    several layers, belong to the root's own layer. This layer is fetched when the model, or a
    module outside the layers, is called, and is kept to the end of backward. If few parameters
    train (adapters), those of all layers belong to it too: see `group_adapters` of
    `ShardingPolicy`. The logger "zero3" lists the layers at level INFO, and warns if the root's own
    layer, without adapters, is larger than any other.

    Args:
        model: Any module that is not sharded yet, with values or on the meta device.
        layers: The submodules that become layers: a class, several classes or modules, or a
            predicate `(name, module) -> bool`. A match inside a match becomes an inner layer, which
            is released while the rest of the outer layer computes. A tuple among several, as
            `[*model.blocks, (model.embed, model.head)]`, is one layer of modules that need not
            stand together: it is gathered when the first of them is called, and stays until each
            has been called. None takes:

            * blocks: the elements of each outermost `ModuleList` that holds at least a tenth of the
              parameters, or of the largest one if none does; then of every list with elements of a
              tenth of the largest block, such as a vision tower's. If an element is never called
              itself, the called modules in it are the blocks;
            * embeddings and heads, unless they are tied or part of a block: the modules that
              `get_input_embeddings()` and `get_output_embeddings()` return, or else every
              `nn.Embedding`; every embedding of half a block's size; and each `nn.Linear` directly
              in the model;
            * further modules, the largest first, until the root's own layer is no larger than the
              largest block.
        optional: Towers: the submodules that some ranks call, any number of times, and others do
            not, as a vision tower where only some ranks have images. A module, its name, its class,
            several of these, or a predicate `(name, module) -> bool`; a list of modules stands for
            its elements. The numbers are those of one process with all ranks' data. Every rank runs
            the forward and the backward. None takes, of a transformers model with a vision or an
            audio part, what stands beside its language model; `()` takes nothing: then all ranks
            call the same layers. See docs/towers.md.
        rank: This process's number in the group. It is only checked; None takes the group's.
        world_size: The number of ranks in the group. It is only checked; None takes the group's.
        device: Where the whole model computes and the chunks live. None: where the model's tensors
            are.
        dtype: The dtype that every trainable parameter must have. It is only checked. None: any
            dtype.
        policy: One policy for all layers, where only the root casts outputs. Or a function `(name,
            module) -> ShardingPolicy`, which gets the name `""` for the root. Fields that count for
            the whole model are the same for all layers and the root (see `ShardingPolicy`), and the
            root's group_adapters says whether adapters are grouped.
        process_group: The ranks that share the model: a process group, or a `DeviceMesh` of one
            dimension, or of two, named `("dp_replicate", "dp_shard")`: chunks are cut over the
            second and repeated over the first; or `("dp_shard", "ep")` for `expert_parallel`, see
            `ShardingPolicy`: all else is cut over all ranks; or `("dp_shard", "sp")`, or with
            `"dp_replicate"` before them: chunks are cut over both, and the ranks of `sp` hold parts
            of the same sequences, see `split_sequence`. None: the default group, or this
            process alone if there is no group.

    Returns:
        `model`, the same object.

    Raises:
        ValueError: No layers are found or matched, the model is sharded already, `optional` matches
            nothing or goes with `dynamic=True`, `expert_parallel` in it or a mesh with `sp`, or
            `Zero3Layer` would refuse a part of the model. All ranks raise the same error, and
            nothing has changed.
        TypeError: `layers`, `policy` or `model` has the wrong type. Again all ranks raise it, and
            nothing has changed.
        RuntimeError: A launcher started several processes, but there is no process group.

    Example::

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model = zero3.shard(model, device=device)
        zero3.load_pretrained(model, directory)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=1e-5)
    """
    one = policy if isinstance(policy, ShardingPolicy) else ShardingPolicy()
    label = f"the root ({type(model).__name__})"
    common = Request(model, rank, world_size, device, dtype, one, process_group, label=label)
    partition = _agreed_partition(common, layers, policy, optional)
    for request in partition.layers:
        for module, layer in zip(
            request.modules, Zero3Layer._from_request(request, partition.will_be_layer), strict=True
        ):
            put(model, module, layer)
    root = build_state(partition.root, is_layer)
    if parts_over(process_group) > 1:
        divide_sequences(model, root, process_group)
    gates = None
    if partition.towers:
        host = host_communicator(root.communicator, root.device)
        gates = put_gates(model, partition.towers, root, host)
    _enter_through_root(root, model, gates)
    refuse_merges(model)
    _report(model, root, partition.adapters)
    return model


@dataclass(frozen=True)
class _Partition:
    layers: list[Request]
    root: Request
    # ids of the parameters that the root has because few train
    adapters: frozenset[int] = frozenset()
    towers: Mapping[str, nn.Module] = field(default_factory=dict)  # by name

    def will_be_layer(self, module: nn.Module) -> bool:
        return is_layer(module) or id(module) in self._ids

    @cached_property
    def in_towers(self) -> set[int]:
        return {id(inner) for tower in self.towers.values() for inner in tower.modules()}

    @cached_property
    def _ids(self) -> set[int]:
        return {id(module) for request in self.layers for module in request.modules}


def _agreed_partition(
    common: Request, layers: Layers, policy: ShardingPolicy | PolicyOf, optional: Optional
) -> _Partition:
    """Says which part of the model becomes which layer. All ranks check it before anything
    changes.
    """
    make_groups(common.process_group)
    error: Exception | None = None
    partition = _Partition([], common)
    try:
        partition = _partitioned(common, layers, policy, optional)
        _check_together(partition)
        refuse_ulysses(common.module)
        if (ranks := parts_over(common.process_group)) > 1:
            check_dividable(common.module, ranks, [part.policy for part in partition.layers])
        partition = _with_adapters(partition)
    except Exception as caught:  # whatever a predicate raises: the other ranks wait to hear of it
        error = caught
    named = [f"optional: {', '.join(partition.towers)}"] if partition.towers else []
    requests = [partition.root, *partition.layers]
    agree_on(requests, partition.will_be_layer, error, more=named)
    return partition


def _asked_once(policy: PolicyOf) -> PolicyOf:
    answers: dict[str, ShardingPolicy] = {}

    def ask(name: str, module: nn.Module) -> ShardingPolicy:
        if name not in answers:
            answers[name] = policy(name, module)
        return answers[name]

    return ask


def _partitioned(
    common: Request, layers: Layers, policy: ShardingPolicy | PolicyOf, optional: Optional
) -> _Partition:
    model = common.module
    common = replace(common, device=device_of(common, lambda module: False))
    if layers_of(model):
        raise ValueError(
            f"this {type(model).__name__} is sharded already, or holds Zero3Layers: shard a model "
            "once, before wrapping any part of it"
        )
    check_modules(own_modules(model, is_layer))
    _check_adapters(model)
    if callable(policy):  # of each module it is asked once
        policy = _asked_once(policy)
    chosen = choose(model, layers)
    towers = _towers(common, policy, optional)
    chosen += [((Candidate(name, tower)),) for name, tower in own_layers(towers, chosen).items()]
    parts = [_part(replace(common, model=model), part) for part in chosen]
    partition = _with_policies(_Partition(parts, common), _as_configured(model, policy))
    root, *parts = with_experts([partition.root, *partition.layers], partition.will_be_layer)
    check_compiled(_outside_or_around(model, {id(m) for part in parts for m in part.modules}))
    tied = tied_across(model, [part.modules for part in parts])
    parts = [replace(part, elsewhere=frozenset(tied)) for part in parts]
    found = _Partition(parts, replace(root, borrowed=tuple(tied.values())), towers=towers)
    for part in parts:
        if part.dealer is not None and id(part.module) in found.in_towers:
            raise ValueError(
                f"layer {part.label} has experts that stay at home (expert_parallel=True), and is "
                "in a tower, which not every rank calls. With optional=() the model has no towers"
            )
    return found


def _towers(
    common: Request, policy: ShardingPolicy | PolicyOf, optional: Optional
) -> dict[str, nn.Module]:
    model, reason = common.module, ""
    if parts_over(common.process_group) > 1:
        reason = "a mesh with sp: ranks that hold parts of the same sequences"
    elif getattr(policy("", model) if callable(policy) else policy, "dynamic", False):
        reason = "ShardingPolicy(dynamic=True): ranks"
        if optional is None:
            return {}
    found = choose_towers(model, optional)
    if found and reason:
        raise ValueError(
            f"optional ({', '.join(found)}) and {reason} would call them in different orders. "
            "optional=() gives a model without towers"
        )
    return found


def _check_together(partition: _Partition) -> None:
    """Checks the parameters of all layers together, because those of two layers may overlap."""
    ignored: set[int] = set()
    for request in (partition.root, *partition.layers):
        if isinstance(request.policy, ShardingPolicy) and request.policy.ignored is not None:
            inner = all_but(request, partition.will_be_layer)
            found = find_parameters(request.module, inner, request.elsewhere, request.borrowed)
            sharded = set(without_ignored(found, request.policy, request.prefix))
            ignored |= {id(sites.parameter) for sites in found if sites not in sharded}
    everything = [
        sites
        for sites in find_parameters(partition.root.module, lambda module: False)
        if id(sites.parameter) not in ignored
    ]
    policies = [request.policy for request in (partition.root, *partition.layers)]
    # a layer with masters looks at their dtype itself
    alike = all(isinstance(p, ShardingPolicy) and p.master_dtype is None for p in policies)
    dtype = partition.root.dtype if alike else None
    check_parameters(everything, dtype, type(partition.root.module).__name__)


def _check_adapters(model: nn.Module) -> None:
    """Refuses adapters of peft that compute with parameters, or write them, where a sharded model
    has none.
    """
    for module in model.modules():
        configs = getattr(module, "peft_config", None)
        for adapter, config in configs.items() if isinstance(configs, dict) else ():
            if (
                reason := _REFUSED_ADAPTERS.get(str(getattr(config.peft_type, "value", None)))
            ) is not None:
                raise ValueError(
                    f"adapter {adapter!r} is of the kind {config.peft_type.value}, which "
                    f"{reason}: a sharded model would train in another way, without a word. Take "
                    "another kind (LORA)"
                )


def _outside_or_around(model: nn.Module, layers: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """The modules in no layer, and those around a layer."""
    inside = {
        id(inner)
        for module in model.modules()
        if id(module) in layers
        for inner in module.modules()
    }
    for name, module in model.named_modules():
        if id(module) not in inside or any(
            id(inner) in layers for inner in module.modules() if inner is not module
        ):
            yield name, module


def _part(common: Request, modules: tuple[Candidate, ...]) -> Request:
    named = [(own_module_name(name), module) for name, module in modules]
    label = " and ".join(f"{name!r} ({type(module).__name__})" for name, module in named)
    if len(named) == 1:
        return replace(common, module=named[0][1], label=label, prefix=f"{named[0][0]}.")
    holder = nn.Module()
    holder._modules.update(named)
    return replace(
        common, module=holder, label=label, together=tuple(module for _, module in named)
    )


def _as_configured(
    model: nn.Module, policy: ShardingPolicy | PolicyOf
) -> ShardingPolicy | PolicyOf:
    """Adds the format that the model's configuration asks for, if the policy has none, and the
    model has weights for it.
    """
    asked = configured_in(getattr(model, "config", None))
    if asked is None or not isinstance(policy, ShardingPolicy) or policy.quantize is not None:
        return policy
    everything = without_ignored(find_parameters(model, lambda module: False), policy)
    base = "base_model.model." if hasattr(model, "peft_config") else ""
    names = formats_of(everything, replace(policy, quantize=asked.format), "", model)
    modules = {
        name: name.removeprefix(base).removesuffix(".weight").removesuffix(".base_layer")
        for name in names
    }
    dims = {sites.name: sites.parameter.dim() for sites in everything}
    kept = frozenset(name for name, module in modules.items() if asked.covers(module, dims[name]))
    if not kept:
        return policy
    kind: Any = asked.format
    return replace(policy, quantize=replace(kind, select=lambda name, info: name in kept))


def _with_policies(partition: _Partition, policy: ShardingPolicy | PolicyOf) -> _Partition:
    if isinstance(policy, ShardingPolicy):
        inner = replace(policy, output_dtype=None)
        return _Partition(
            [replace(part, policy=inner) for part in partition.layers],
            replace(partition.root, policy=policy),
        )
    if not callable(policy):
        raise TypeError(
            "policy must be a zero3.ShardingPolicy or (name, module) -> ShardingPolicy, found "
            f"{type(policy).__name__}"
        )
    names = {id(module): name for name, module in partition.root.module.named_modules()}
    found = _Partition([], replace(partition.root, policy=policy("", partition.root.module)))
    found.layers.extend(
        replace(part, policy=policy(names[id(part.modules[0])], part.modules[0]))
        for part in partition.layers
    )
    each = [
        (str(request.label), request.policy)
        for request in (found.root, *found.layers)
        if isinstance(request.policy, ShardingPolicy)
    ]
    if each and (error := unlike(each)) is not None:  # what is no policy is refused later
        raise error
    return found


def _with_adapters(partition: _Partition) -> _Partition:
    """Gives the trainable parameters of layers to the root, if they are few. So one gather and one
    reduction serve all of them.
    """
    policy = partition.root.policy
    tied = {id(sites.parameter) for sites in partition.root.borrowed}
    # the former is refused later
    if not isinstance(policy, ShardingPolicy) or not policy.group_adapters:
        return partition
    everything = without_ignored(
        find_parameters(partition.root.module, lambda module: False), policy
    )
    adapters = {
        id(sites.parameter): sites
        for sites in few_that_train(everything)
        if id(sites.parameter) not in tied
    }
    parts, moved = [], dict[int, ParameterSites]()
    for part in partition.layers:
        if part.dealer is not None or id(part.modules[0]) in partition.in_towers:
            parts.append(part)
            continue
        alike = replace(part.policy, output_dtype=policy.output_dtype) == policy
        own = find_parameters(part.module, all_but(part, partition.will_be_layer))
        found = {id(sites.parameter) for sites in own if alike} & adapters.keys()
        moved |= {key: adapters[key] for key in found}
        parts.append(replace(part, elsewhere=part.elsewhere | found))
    borrowed = (
        *partition.root.borrowed,
        *(sites for key, sites in adapters.items() if key in moved),
    )
    root = replace(partition.root, borrowed=borrowed)
    return _Partition(parts, root, frozenset(moved), partition.towers)


def _enter_through_root(state: LayerState, model: nn.Module, gates: Gates | None) -> None:
    """Gives the model the root's own layer, and makes every module outside the layers fetch that
    layer when it is called.

    Not all calls come through the model: generation calls an encoder by itself, and users call
    `model.get_decoder()`.
    """
    state.chunks.list_in(model._parameters)
    model._zero3_root = state  # type: ignore[assignment]
    lent = {
        module
        for sharded in state.parameters
        if sharded.chunk.trains
        for module, _ in sharded.sites.places
    }
    for layer in layers_of(model):
        if any(module in lent for _, module in own_modules(layer.module, is_layer)):
            layer._state.parameters.lend_to(state.parameters)
    runtime = adopt(model, ordered=False, outer=[state], order=gates)
    if gates is not None:
        gates.serve(runtime)
    generate = partial(_generate, weakref.ref(state))
    for _, module in own_modules(model, is_layer):
        guard(module, is_layer, lists_chunks=module is model)
        if is_callable(module):
            enter_root(module, state, runtime)
        if callable(getattr(type(module), "generate", None)):
            Override(module, "generate", generate)
        for name in _CONTINUOUS_BATCHING:
            if callable(getattr(type(module), name, None)):
                Override(module, name, partial(_batch_if_resident, weakref.ref(state), name))
        # it is told now if the model has a hook that does it, and later if it gets one
        if is_first(state.communicator) and callable(
            getattr(type(module), _ENABLE_GRADIENTS, None)
        ):
            Override(module, _ENABLE_GRADIENTS, _enable_input_gradients)
    if is_first(state.communicator):
        _warn_of_input_gradients(model)


def _generate(
    root: weakref.ref[LayerState],
    module: nn.Module,
    generate: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Generation reads parameters between its forwards, such as image tokens. So the root's own
    layer stays fetched meanwhile.
    """
    state = root()
    if state is None:
        raise RuntimeError(
            f"the sharded model that this {type(module).__name__} belongs to is gone"
        )
    with pinned([state], "generate", "compute"):
        return generate(*args, **kwargs)


def _batch_if_resident(
    root: weakref.ref[LayerState],
    name: str,
    module: nn.Module,
    method: Callable[..., Any],
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A thread calls the model there, as often as this rank's prompts need, and drops what it
    raises: half of a text would come back.
    """
    if name == "generate_batch":  # all of it is in this call
        with resident(module):
            return method(*args, **kwargs)
    state = root()
    if state is None or not state.pins.resident:
        raise RuntimeError(
            f"{name} of a sharded {type(module).__name__}: continuous batching calls the model at "
            "each rank's own pace, and ranks gather its layers together. Put all of it inside of "
            "`with zero3.resident(model):`, where every rank holds the whole model"
        )
    return method(*args, **kwargs)


def _report(model: nn.Module, root: LayerState, adapters: frozenset[int]) -> None:
    if not is_first(root.communicator):
        return
    grouped = [sharded for sharded in root.parameters if id(sharded.sites.parameter) in adapters]
    of: dict[LayerState, list[str]] = {}
    for layer in layers_of(model):
        of.setdefault(layer._state, []).append(type(layer.module).__name__)
    kinds: dict[str, list[int]] = {}
    for state, names in of.items():
        kinds.setdefault(" and ".join(names), []).append(state.chunks.full_nbytes())
    parts = ", ".join(
        f"{len(sizes)} x {kind} (each up to {megabytes(max(sizes))})"
        for kind, sizes in kinds.items()
    )
    aside = sum(
        sharded.stand_in.numel() * sharded.chunk.compute_dtype.itemsize for sharded in grouped
    )
    own, largest = root.chunks.full_nbytes() - aside, max(max(sizes) for sizes in kinds.values())
    own_names = [sharded.sites.name for sharded in root.parameters if sharded not in grouped]
    listed = ", ".join(own_names[:6]) + " ..." * (len(own_names) > 6) or "nothing"
    if grouped:
        parts += (
            f"; {len(grouped)} adapters of layers in the root's own layer, together "
            f"({megabytes(aside)})"
        )
    name = type(model).__name__
    _log.info("%s: %s; in the root's own layer %s (%s)", name, parts, megabytes(own), listed)
    if own > largest:
        _log.warning(
            "%s: the root's own layer holds %s, more than the largest layer (%s), from the "
            "forward to the end of backward. Name more submodules in layers=, or untie what is "
            "tied (%s).",
            name, megabytes(own), megabytes(largest), listed,
        )  # fmt: skip


def _enable_input_gradients(module: nn.Module, enable: Callable[[], Any]) -> None:
    enable()
    _warn_of_input_gradients(module)


def _warn_of_input_gradients(model: nn.Module) -> None:
    hooked = [
        module
        for each in model.modules()
        for module in {each, unwrapped(each)}
        for hook in module._forward_hooks.values()
        if getattr(hook, "__name__", "") in _GRADIENT_HOOKS
    ]
    frozen = [
        module
        for module in map(unwrapped, hooked)
        if not any(p.requires_grad for _, p in parameters_of(module) if p is not None)
    ]
    if frozen and not any(_recomputes_reentrantly(module) for module in plain_modules(model)):
        _log.warning(
            "%s: the output of its frozen embeddings needs gradients (%s). So backward gathers "
            "and differentiates all layers, also those below the first one that trains, for "
            "gradients that nobody uses. Only reentrant checkpointing needs that: call "
            "model.disable_input_require_grads() after gradient_checkpointing_enable() with "
            "use_reentrant=False.",
            type(model).__name__, _ENABLE_GRADIENTS,
        )  # fmt: skip


def _recomputes_reentrantly(module: nn.Module) -> bool:
    """Whether transformers checkpoints the module in the reentrant way, which is torch's
    default.
    """
    if not vars(module).get("gradient_checkpointing"):
        return False
    function = getattr(module, "_gradient_checkpointing_func", None)
    return function is not None and bool(
        getattr(function, "keywords", {}).get("use_reentrant", True)
    )


@contextmanager
def logging_only(tells: Callable[[logging.LogRecord], bool]) -> Iterator[None]:
    """Context in which zero3's log has what `tells` lets pass."""
    own = partial(tells)  # the context's alone: another thread's may give the same function
    _log.addFilter(own)
    try:
        yield
    finally:
        _log.removeFilter(own)
