"""A layer's parameters in groups, and the chunk of each group, with rank 0's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..comm.agreement import Members, agreeing
from ..comm.communicator import Communicator, is_first
from ..comm.factory import Dealing
from ..core.chunk import Chunk, Placement
from ..core.layout import ChunkLayout
from ..core.sites import ParameterSites, Views
from ..experts.finding import layouts
from ..faces.quantised import Quantised
from ..policy import ShardingPolicy, compute_dtype, dtypes_kept, master_dtype
from ..quantized.formats import Format
from ..stores.resting import Resting
from .axes import chunk_of
from .host import host_of, memory_for
from .scattering import scatter_parameters

__all__: list[str] = []


def chunk_groups(
    parameters: Sequence[ParameterSites],
    formats: Mapping[str, Format],
    policy: ShardingPolicy,
    device: torch.device,
    *,
    apart: bool,
) -> list[list[ParameterSites]]:
    """Groups parameters by (trainable or frozen, dtype or quantised): a chunk for each group, in
    the order of groups' first parameters. `apart`: the module's own are groups of their own.
    """
    groups: dict[object, list[ParameterSites]] = {}
    kinds = {kind.name: kind for kind in formats.values()}
    codecs = {name: kind.codec(device) for name, kind in kinds.items()}  # with tables
    faces: dict[str, Quantised] = {}
    masters: dict[torch.dtype, Views] = {}
    for sites in parameters:
        key: tuple[bool, torch.dtype | str] = sites.parameter.requires_grad, sites.parameter.dtype
        alone = apart and _is_own(sites)
        if (kind := formats.get(sites.name)) is not None:
            key = False, kind.name
            # chunks let go of their buffers one by one, and a face with its chunk
            face = faces.setdefault(
                sites.name if alone else kind.name, Quantised(kind, codecs[kind.name], device)
            )
            face.take(sites, compute_dtype(policy, sites.parameter.dtype))
        elif sites.parameter.requires_grad and policy.master_dtype is not None:
            own = sites.parameter.dtype
            sites.take_face(masters.setdefault(own, Views(own, master_dtype(policy, own))), None)
        groups.setdefault(sites.name if alone else key, []).append(sites)
    return list(groups.values())


def offloaded(
    groups: list[list[ParameterSites]],
    among: Communicator | Dealing,
    device: torch.device,
    policy: ShardingPolicy,
) -> list[tuple[Resting, Tensor] | None]:
    """Where the chunk of each group rests, and memory for its values there, and for its gradients.
    None: where its layer computes.

    Raises:
        OSError, RuntimeError, ValueError: There is no room for them on some rank. All ranks raise
            it.
    """
    if policy.offload is None:
        return [None for _ in groups]
    found: list[tuple[Resting, Tensor] | None] = []
    communicator = among.whole if isinstance(among, Dealing) else among
    with agreeing(Members(communicator, device), "the memory for what is offloaded"):
        for group in groups:
            place = host_of(communicator).place_for(policy, device)
            if place is None:
                found.append(None)
                continue
            whole, _ = _placed(group, among)
            numel = whole.layout.chunk_numel(whole.index)
            stored, own = _dtype_of(group), group[0].parameter.dtype
            trains = group[0].parameter.requires_grad
            kept = dtypes_kept(policy, stored, compute_dtype(policy, own)) if trains else []
            found.append((place, memory_for(place, numel, stored, device, kept)))
    return found


def _is_own(sites: ParameterSites) -> bool:
    """Whether it is a parameter of the layer's module itself."""
    return "." not in sites.name


def _placed(
    group: list[ParameterSites], among: Communicator | Dealing
) -> tuple[Placement, Placement | None]:
    """Of a group's chunk: of all values, and of those that this rank computes with, if not all."""
    shapes = [(sites.name, sites.face.stored(sites)[0]) for sites in group]
    if isinstance(among, Dealing) and not _is_own(group[0]):
        among = among.ranks  # what experts share, such as a norm, is cut as everything else
    if not isinstance(among, Dealing):
        return Placement.of(ChunkLayout.build(shapes, among.shards), among), None
    (named,), experts = shapes, len(group[0].parameter)
    layout, *parts = layouts(*named, experts, among.among.world_size, among.at.shards)
    return Placement.of(layout, among.whole), Placement.of(parts[among.block], among.at)


def _dtype_of(group: list[ParameterSites]) -> torch.dtype:
    return group[0].face.stored(group[0])[1]


@torch.no_grad()
def new_chunk(
    group: list[ParameterSites],
    among: Communicator | Dealing,
    device: torch.device,
    unloaded: set[str],
    policy: ShardingPolicy,
    offloaded: tuple[Resting, Tensor] | None,
) -> tuple[Chunk, list[ParameterSites]]:
    """Makes one group's chunk from rank 0's values. A rank holds no more memory than its module and
    this chunk.

    Parameters in `unloaded` have no values on rank 0, and are loaded later. If all are unloaded,
    nothing is sent.
    """
    whole, at = _placed(group, among)
    layout, communicator = whole.layout, whole.communicator
    by_name = {sites.name: sites for sites in group}
    ordered = [by_name[slot.name] for slot in layout.slots]
    dtype, trainable = _dtype_of(group), group[0].parameter.requires_grad
    place, shard = offloaded or (
        None,
        torch.empty(layout.chunk_numel(whole.index), dtype=dtype, device=device),
    )
    bare = unloaded.issuperset(by_name)
    if not bare:
        blank = torch.zeros((), dtype=dtype)

        def value(index: int) -> Tensor:
            sites = ordered[index]
            return (
                blank.expand(sites.face.stored(sites)[0])
                if sites.name in unloaded
                else sites.face.store(sites, device)
            )

        here = shard if shard.device == device else torch.empty_like(shard, device=device)
        scatter_parameters(here, layout, communicator, value if is_first(communicator) else None)
        if here is not shard:
            shard.copy_(here)
        if place is not None:
            place.rest(shard)
    parameter = nn.Parameter(shard, requires_grad=trainable)
    face = ordered[0].face  # all have the same
    chunk = chunk_of(whole, parameter, (place, device), policy, face, at)
    if bare:  # the loader will write everything except the padding
        shard[max(0, layout.numel - layout.chunk_range(whole.index)[0]) :].zero_()
    chunk.unloaded.update(i for i, sites in enumerate(ordered) if sites.name in unloaded)
    return chunk, ordered
