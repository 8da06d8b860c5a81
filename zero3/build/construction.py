"""Makes a LayerState from a module: each rank checks its module, all ranks agree, and rank 0's
values are scattered.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..casting import caller_for
from ..comm.agreement import IN_GROUP, agree, meeting
from ..comm.communicator import Communicator
from ..comm.factory import (
    IDENTITY_BYTES,
    Dealer,
    Dealing,
    WrongMesh,
    any_device_of,
    communicator_for,
    decline,
    divided_beside,
)
from ..comm.plain_values import integer, not_copied
from ..conductors.comparing import conductor_for
from ..core.full_buffer import Lifetime
from ..core.ignored import IgnoredGradient
from ..core.layer_state import Behaviour, LayerState
from ..core.sites import ParameterSites
from ..experts.at_home import AtHome
from ..experts.finding import check_experts
from ..guards.backward_inputs import know_chunks
from ..guards.marks import mark, mark_ignored, mark_sharded
from ..guards.optimizer_steps import steps_seen
from ..guards.unshardable import check_modules, check_parameters
from ..guards.wrappers import wrapper_in
from ..modules import CONTAINERS, dotted, find_parameters, is_callable, own_modules
from ..policy import (
    ShardingPolicy,
    compute_dtype,
    directory_of,
    dtypes_at_the_edges,
    dtypes_kept,
    master_dtype,
    rests_in,
    rounding,
    shards_parameters,
    unlike,
)
from ..quantized.formats import Format
from .axes import gradients_of
from .host import host_of
from .new_chunks import chunk_groups, new_chunk, offloaded
from .selecting import formats_of, nothing_selected, without_ignored

__all__: list[str] = []

_ON_META, _READS = 1, 2  # flags that ranks tell each other


@dataclass(frozen=True, slots=True)
class Request:
    """A user's arguments for one layer, not yet checked."""

    module: nn.Module
    rank: int | None
    world_size: int | None
    device: torch.device | str | int | None
    dtype: torch.dtype | None
    policy: ShardingPolicy
    process_group: object
    label: str | None = None  # the layer's name in errors; None: the module's type
    prefix: str = ""  # what stands before the parameters' names in the model
    elsewhere: frozenset[int] = frozenset()  # ids of parameters that another layer owns
    borrowed: tuple[ParameterSites, ...] = ()  # parameters inside other layers that this one owns
    model: nn.Module | None = None  # the model that the module is a part of; None: it is the model
    # the modules that form the layer, where they are several; then `module` only holds them
    together: tuple[nn.Module, ...] = ()
    dealer: Dealer | None = None  # of experts that stay with the ranks that own them

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules that are called."""
        return self.together or (self.module,)


class _Found(NamedTuple):
    """What a module holds."""

    parameters: Sequence[ParameterSites] = ()
    ignored: Sequence[nn.Parameter] = ()
    formats: Mapping[str, Format] = MappingProxyType({})  # of quantised parameters
    buffers: Sequence[_Buffer] = ()
    lines: Sequence[str] = ()  # what the ranks compare
    reads: bool = True  # whether a backward reads the parameters


@dataclass(frozen=True, slots=True)
class _Examined:
    """A request, checked on this rank alone, and what was found."""

    request: Request
    device: torch.device
    communicator: Communicator
    error: Exception | None
    found: _Found

    @property
    def on_meta(self) -> dict[str, bool]:
        """The name of every parameter and buffer -> whether it is on the meta device."""
        return {b.name: b.parameter.is_meta for b in self.found.parameters} | {
            b.name: b.tensor.is_meta for b in self.found.buffers
        }

    @property
    def label(self) -> str:
        return self.request.label or type(self.request.module).__name__

    def take_room(self, held: ExitStack) -> None:
        """Takes as much room on a disk as the layer will need, until `held` is closed."""
        policy, shards = self.request.policy, self.communicator.shards
        if (directory := directory_of(policy)) is not None:
            nbytes, dealer = 0, self.request.dealer
            blocks = 1 if dealer is None else dealer.blocks(self.device)
            for sites in self.found.parameters:
                parameter, kind = sites.parameter, self.found.formats.get(sites.name)
                most = Fraction(1)
                if dealer is not None and "." not in sites.name:  # experts
                    most = Fraction(-(-len(parameter) // blocks) * blocks, len(parameter))
                own, trains = parameter.dtype, parameter.requires_grad
                if kind is not None:
                    nbytes += math.ceil(math.prod(kind.stored(parameter.shape)) * most)
                    continue
                stored = master_dtype(policy, own) if trains else own
                kept = dtypes_kept(policy, stored, compute_dtype(policy, own)) if trains else []
                nbytes += math.ceil(parameter.numel() * most) * sum(
                    dtype.itemsize for dtype in [stored, *kept]
                )
            held.enter_context(
                host_of(self.communicator).room_on_disk(directory, -(-nbytes // shards))
            )

    def agree(self) -> tuple[bytes, bool, bool]:
        """Compares the ranks. Returns rank 0's number for the layer, whether rank 0 has any tensor
        on meta, and whether a backward reads the parameters on any rank.
        """
        subject = "a new layer" if self.error is not None else f"a new layer ({self.label})"
        flags = any(self.on_meta.values()) * _ON_META | self.found.reads * _READS
        note = secrets.token_bytes(IDENTITY_BYTES) + bytes([flags])
        alone = self.request.label is None  # else `shard` has met for all of its layers
        with meeting(self.communicator, self.error) if alone else nullcontext():
            notes = agree(
                self, subject, self.found.lines, self.error, note=note, caller="Zero3Layer"
            )
        first = notes[0]
        reads = any(each[IDENTITY_BYTES] & _READS for each in notes)
        return first[:IDENTITY_BYTES], bool(first[IDENTITY_BYTES] & _ON_META), reads


def agree_on(
    requests: Sequence[Request],
    is_layer: Callable[[nn.Module], bool],
    error: Exception | None,
    caller: str = "shard",
    more: Sequence[str] = (),
) -> None:
    """Checks all `requests`. Every rank raises the first mistake, or a rank's `error`, or none
    raises. Changes nothing.

    `is_layer` is also True for modules that other requests will make layers. `more`: what else has
    to be the same.
    """
    examined = [_examine(request, all_but(request, is_layer)) for request in requests]
    first = examined[0]
    error = error or next((each.error for each in examined if each.error is not None), None)
    quantizing = [
        each for each in examined if error is None and each.request.policy.quantize is not None
    ]
    if quantizing and not any(each.found.formats for each in quantizing):
        parameters = [sites for each in quantizing for sites in each.found.parameters]
        error = nothing_selected(
            f"this {type(requests[0].module).__name__}", quantizing[0].request.policy, parameters
        )
    lines = [*more, *(f"{each.label}: {line}" for each in examined for line in each.found.lines)]
    with ExitStack() as held:  # until all ranks have looked: those of one host share a disk
        try:
            for each in examined if error is None else ():
                each.take_room(held)
        except (OSError, ValueError) as caught:
            error = caught
        lines.insert(0, IN_GROUP + divided_beside(first.request.process_group))
        with meeting(first.communicator, error):
            agree(first, "what becomes a layer", lines, error, caller=caller)


def all_but(request: Request, is_layer: Callable[[nn.Module], bool]) -> Callable[[nn.Module], bool]:
    """Works as `is_layer`, but is False for the modules that `request` makes a layer."""
    own = {id(module) for module in request.modules}
    return lambda module: id(module) not in own and is_layer(module)


def build_state(request: Request, is_layer: Callable[[nn.Module], bool]) -> LayerState:
    """Shards `request.module`. All ranks raise the same error before anything has changed, or none
    raises.

    Raises:
        ValueError: `rank` or `world_size` differ from the process group's, a parameter or buffer
            can't be sharded, or ranks have different modules or policies.
        TypeError: An argument has the wrong type.
        RuntimeError: A launcher started several processes, but there is no process group.
    """
    know_chunks()
    steps_seen()
    examined = _examine(request, is_layer)
    number, meta, reads = examined.agree()
    device, label, policy = examined.device, examined.label, request.policy
    dealing = request.dealer and request.dealer.deal(examined.communicator, device)
    shared = (dealing.at, dealing.among) if dealing else ()
    for communicator in (examined.communicator, *shared):
        communicator.channel = int.from_bytes(number, "little")
    communicator, over = (dealing.whole, dealing.at) if dealing else (communicator, communicator)
    home = AtHome(request.module, dealing, dtypes_at_the_edges(policy)) if dealing else None
    behaviour = Behaviour(
        device=device,
        policy=policy,
        modules=len(request.modules),
        call=home or caller_for(*dtypes_at_the_edges(policy)),
        conductor=conductor_for(policy.compare_every),
        lifetime=lifetime_of(policy),
        rounding=rounding(policy),
        reads_weights=reads,
    )
    state = LayerState(
        label,
        communicator,
        behaviour,
        lambda subject: gradients_of(communicator, over, policy, subject),
    )
    if home is not None:
        home.serve(state)
    unloaded: set[str] = set()
    if meta:
        empty_on_rank_0 = communicator.exchange(bytes(examined.on_meta.values()), device)[0]
        unloaded = {
            name for name, empty in zip(examined.on_meta, empty_on_rank_0, strict=True) if empty
        }
    _add_chunks(state, examined, dealing or communicator, unloaded)
    alone = [parameter for parameter in examined.found.ignored if mark_ignored(parameter, state)]
    mean = policy.gradient_reduction == "mean"
    state.gradients.leave_alone(
        IgnoredGradient(
            each, communicator.world_size, transactional=policy.transactional, mean=mean
        )
        for each in alone
    )
    for buffer in examined.found.buffers:
        buffer.broadcast(communicator, device, unloaded=buffer.name in unloaded)
    state.meta_buffers.extend(
        (b.owner, b.attribute, b.name) for b in examined.found.buffers if b.tensor.is_meta
    )
    return state


def _add_chunks(
    state: LayerState, examined: _Examined, among: Communicator | Dealing, unloaded: set[str]
) -> None:
    policy, device, label = examined.request.policy, examined.device, examined.label
    apart = isinstance(among, Dealing)
    groups = chunk_groups(
        examined.found.parameters, examined.found.formats, policy, device, apart=apart
    )
    for group, place in zip(groups, offloaded(groups, among, device, policy), strict=True):
        chunk, found = new_chunk(group, among, device, unloaded, policy, place)
        given = [sites.parameter for sites in found]  # the layer may put others in their places
        state.add_chunk(chunk, found)
        mark(chunk.shard, state)
        for sites, parameter in zip(found, given, strict=True):
            for each in (parameter, sites.parameter):
                mark_sharded(each, f"{sites.name!r} of layer {label}", state)


def reads_weights(
    modules: Sequence[nn.Module],
    parameters: Sequence[ParameterSites],
    formats: Mapping[str, Format],
) -> bool:
    """Whether a backward reads the parameters. That of torch's own embedding knows of the ids
    alone, if nobody's hooks, those of all modules too, or `forward` stand in its place.
    """
    module, *others = modules
    places = [(sites.parameter, place) for sites in parameters for place in sites.places]
    if type(module) is not nn.Embedding or others or formats or len(places) != 1:
        return True
    weight, place = places[0]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return bool(
        place != (module, "weight")
        or type(weight) is not nn.Parameter
        or module.max_norm is not None
        or "forward" in vars(module)
        or nn.Embedding.forward.__globals__ is not vars(nn.modules.sparse)  # another in its place
        or any(vars(module)[name] or vars(nn.modules.module)[f"_global{name}"] for name in hooks)
        or weight._backward_hooks
        or getattr(weight, "_post_accumulate_grad_hooks", None)
    )


def lifetime_of(policy: ShardingPolicy) -> Lifetime:
    if not shards_parameters(policy):
        return Lifetime.STEPS
    return Lifetime.CALL if policy.reshard_after_forward else Lifetime.PASS


def _examine(request: Request, is_layer: Callable[[nn.Module], bool]) -> _Examined:
    error: Exception | None = None
    try:
        device = device_of(request, is_layer)
    except (TypeError, ValueError) as caught:
        # a device is needed to send the error to the other ranks
        device, error = any_device_of(request.process_group), caught
    try:
        communicator = communicator_for(request.process_group, device)
    # the argument is no group; the other ranks most likely use the default group
    except (TypeError, WrongMesh) as caught:
        communicator, error = communicator_for(None, device), error or caught
    except ValueError as caught:  # nobody knows which group it was to be
        decline("Zero3Layer" if request.label is None else "shard", caught)
        raise
    found = _Found()
    if error is None:
        try:
            found = _found_in(request, device, communicator, is_layer)
        except (TypeError, ValueError) as caught:
            error = caught
    return _Examined(request, device, communicator, error, found)


def _found_in(
    request: Request,
    device: torch.device,
    communicator: Communicator,
    is_layer: Callable[[nn.Module], bool],
) -> _Found:
    """What a request's module holds.

    Raises:
        ValueError, TypeError: It can't be sharded so.
    """
    module, policy = request.module, request.policy
    _check_request(request, communicator, is_layer)
    found = find_parameters(module, is_layer, request.elsewhere, request.borrowed)
    parameters = without_ignored(found, policy, request.prefix)
    stored = partial(master_dtype, policy)
    check_parameters(parameters, request.dtype, request.label or type(module).__name__, stored)
    host_of(communicator).check_place(policy, device)
    model = module if request.model is None else request.model
    formats = formats_of(parameters, policy, request.prefix, model)
    if request.dealer is not None:
        blocks = request.dealer.blocks(device)
        check_experts(module, request.prefix, found, parameters, formats, blocks)
    alone = request.label is None and not any(is_layer(inner) for inner in module.modules())
    # `shard` looks at all layers together
    if policy.quantize is not None and not formats and alone:
        raise nothing_selected(f"this {type(module).__name__}", policy, parameters)
    buffers = _buffers_of(module, is_layer)
    _check_dtypes(
        [
            *((p.name, p.parameter.dtype) for p in parameters),
            *((b.name, b.tensor.dtype) for b in buffers),
        ]
    )
    lines = _digest(request, device, parameters, formats, buffers)
    # `shard` chooses modules that are called; its root need not be one
    if parameters and request.label is None:
        _check_called(module)
    sharded = set(parameters)
    ignored = [sites.parameter for sites in found if sites not in sharded]
    reads = reads_weights(request.modules, parameters, formats)
    return _Found(parameters, ignored, formats, buffers, lines, reads)


def device_of(request: Request, is_layer: Callable[[nn.Module], bool]) -> torch.device:
    if not isinstance(request.module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, found {type(request.module).__name__}")
    if request.device is not None:
        try:
            device = torch.device(request.device)
            # a tensor's device has an index, and exists
            return _not_meta(torch.empty(0, device=device).device, request)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device={request.device!r} is not to be had here: {error}") from None
    found: dict[torch.device, str] = {}
    for prefix, module in own_modules(request.module, is_layer):
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and not tensor.is_meta:
                found.setdefault(tensor.device, dotted(prefix, name))
    if len(found) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in found.items())
        raise ValueError(
            f"the module's tensors are on several devices ({places}): pass device= to say where "
            "the layer computes"
        )
    # a layer around layers
    inside = (
        parameter.device for parameter in request.module.parameters() if not parameter.is_meta
    )
    return _not_meta(next(iter(found), None) or next(inside, torch.get_default_device()), request)


def _not_meta(device: torch.device, request: Request) -> torch.device:
    if device.type == "meta" and not host_of(request.process_group).on_paper:
        raise ValueError(
            "a layer can't compute on the meta device: its module may be built there, but wrap it "
            'outside of `with torch.device("meta")`, or pass the device= on which it computes'
        )
    return device


def _check_request(
    request: Request, communicator: Communicator, is_layer: Callable[[nn.Module], bool]
) -> None:
    if is_layer(request.module):
        raise ValueError(
            "the module is a Zero3Layer already, expected an unwrapped module: wrap a module once"
        )
    check_modules(own_modules(request.module, is_layer))
    if wrapper := wrapper_in(own_modules(request.module, is_layer)):
        raise ValueError(
            f"the module is, or holds, {wrapper}: pass the model that was wrapped. zero3 does all "
            "that the wrapper does"
        )
    if not isinstance(request.policy, ShardingPolicy):
        raise TypeError(
            f"policy must be a zero3.ShardingPolicy, found {type(request.policy).__name__}"
        )
    held = (vars(module).get("_state") for module in request.module.modules() if is_layer(module))
    # a block may have a `_state`
    inner = [
        (f"layer {state.label}", state.policy) for state in held if isinstance(state, LayerState)
    ]
    differing = unlike([("the layer around them", request.policy), *inner])
    if differing is not None:
        raise differing
    if request.dtype is not None and not isinstance(request.dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype or None, found {request.dtype!r}")
    if request.policy.reduce_format is not None and not hasattr(communicator, "all_to_all"):
        raise ValueError(
            f"reduce_format={request.policy.reduce_format} needs an all_to_all, which "
            f"{type(communicator).__name__} does not have: add it, or leave reduce_format out"
        )
    for name, given, actual in (
        ("rank", request.rank, communicator.shard_rank),
        ("world_size", request.world_size, communicator.shards),
    ):
        if given is None:
            continue
        if integer(given) is None:
            raise TypeError(f"{name} must be an integer or None, found {given!r}")
        if given != actual:
            raise ValueError(
                f"{name}={given}, but the process group says {actual}. Pass {name}=None to take "
                "the group's, or the process_group that you mean."
            )


def _check_dtypes(dtypes: Iterable[tuple[str, torch.dtype]]) -> None:
    wrong = [
        f"tensor {name!r} {why}" for name, dtype in dtypes if (why := not_copied(dtype)) is not None
    ]
    if wrong:
        raise ValueError(wrong[0])


def _check_called(module: nn.Module) -> None:
    if isinstance(module, CONTAINERS) and not is_callable(module):
        raise ValueError(
            f"a {type(module).__name__} is never called, so it can't be a layer: a layer is "
            "fetched when it is called. Wrap what it holds, each element by itself, or "
            "zero3.shard the model"
        )


def _digest(
    request: Request,
    device: torch.device,
    parameters: list[ParameterSites],
    formats: dict[str, Format],
    buffers: list[_Buffer],
) -> list[str]:
    told_by_parameters = ("ignored", "quantize")
    chosen = {
        f.name: getattr(request.policy, f.name)
        for f in fields(request.policy)
        if f.name not in told_by_parameters
    }
    chosen["offload"] = rests_in(request.policy)  # hosts may have different directories
    lines = [f"policy { {name: value} }" for name, value in chosen.items()]
    lines.append(f"device type {device.type}")
    lines += [
        (
            f"parameter {b.name}: shape {tuple(b.parameter.shape)}, {b.parameter.dtype}, "
            f"requires_grad={b.parameter.requires_grad}"
        )
        + (f", quantised as {formats[b.name].name}" if b.name in formats else "")
        for b in parameters
    ]
    lines += [f"buffer {b.name}: shape {tuple(b.tensor.shape)}, {b.tensor.dtype}" for b in buffers]
    return lines


@dataclass(frozen=True, slots=True)
class _Buffer:
    owner: nn.Module
    attribute: str
    name: str

    @property
    def tensor(self) -> Tensor:
        return self.owner._buffers[self.attribute]  # type: ignore[return-value]

    def broadcast(
        self, communicator: Communicator, device: torch.device, *, unloaded: bool
    ) -> None:
        """Copies rank 0's values to all ranks, on the layer's device. A buffer that is `unloaded`
        stays on meta for a loader.
        """
        if unloaded:
            self.owner._buffers[self.attribute] = self.tensor.to("meta")
            return
        self.owner._buffers[self.attribute] = (
            torch.empty_like(self.tensor, device=device)
            if self.tensor.is_meta
            # transfers move memory, and that of `tensor.conj()` holds other numbers
            else self.tensor.to(device).resolve_conj().resolve_neg()
        )
        communicator.broadcast(self.tensor)


def _buffers_of(module: nn.Module, is_layer: Callable[[nn.Module], bool]) -> list[_Buffer]:
    return [
        _Buffer(owner, attribute, dotted(prefix, attribute))
        for prefix, owner in own_modules(module, is_layer)
        for attribute, buffer in owner._buffers.items()
        if buffer is not None
    ]
