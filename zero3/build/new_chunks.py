"""A layer's parameters in groups, and the chunk of each group, with rank 0's values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..comm.agreement import agreeing
from ..comm.communicator import Communicator, is_first
from ..core.chunk import Chunk
from ..core.layout import ChunkLayout
from ..core.offloaded_chunk import chunk_of, quantized_chunk_of
from ..core.parameters import ParameterSites
from ..core.quantized_chunk import QuantizedSites
from ..core.residence import Residence, host_of, memory_for
from ..policy import ShardingPolicy
from ..quantized.formats import Format
from .scattering import scatter_parameters

__all__: list[str] = []


def chunk_groups(
    parameters: Sequence[ParameterSites],
    formats: Mapping[str, Format],
    policy: ShardingPolicy,
    device: torch.device,
) -> list[list[ParameterSites]]:
    """Groups parameters by (trainable or frozen, dtype or quantised): a chunk for each group, in
    the order of groups' first parameters.
    """
    groups: dict[tuple[bool, torch.dtype | str], list[ParameterSites]] = {}
    # their tables are shared
    codecs = {
        kind.name: kind.codec(device)
        for kind in {kind.name: kind for kind in formats.values()}.values()
    }
    for sites in parameters:
        if (kind := formats.get(sites.name)) is not None:
            groups.setdefault((False, kind.name), []).append(
                QuantizedSites(sites, kind, codecs[kind.name], policy, device)
            )
        else:
            groups.setdefault((sites.parameter.requires_grad, sites.parameter.dtype), []).append(
                sites
            )
    return list(groups.values())


def offloaded(
    groups: list[list[ParameterSites]],
    communicator: Communicator,
    device: torch.device,
    policy: ShardingPolicy,
) -> list[tuple[Residence, Tensor] | None]:
    """Where the chunk of each group rests, and memory for its values there, and for its gradients.
    None: where its layer computes.

    Raises:
        OSError, RuntimeError, ValueError: There is no room for them on some rank. All ranks raise
            it.
    """
    if policy.offload is None:
        return [None for _ in groups]
    found: list[tuple[Residence, Tensor] | None] = []
    with agreeing(communicator, device, "the memory for what is offloaded"):
        for group in groups:
            residence = host_of(communicator).residence_for(policy, device)
            if residence is None:
                found.append(None)
                continue
            numel, trains = (
                _layout_of(group, communicator).shard_numel,
                policy if group[0].parameter.requires_grad else None,
            )
            found.append(
                (residence, memory_for(residence, numel, group[0].stored_dtype, device, trains))
            )
    return found


def _layout_of(group: list[ParameterSites], communicator: Communicator) -> ChunkLayout:
    return ChunkLayout.build([(b.name, b.stored_shape) for b in group], communicator.shards)


@torch.no_grad()
def new_chunk(
    group: list[ParameterSites],
    communicator: Communicator,
    device: torch.device,
    unloaded: set[str],
    policy: ShardingPolicy,
    offloaded: tuple[Residence, Tensor] | None,
) -> tuple[Chunk, list[ParameterSites]]:
    """Makes one group's chunk from rank 0's values. A rank holds no more memory than its module and
    this chunk.

    Parameters in `unloaded` have no values on rank 0, and are loaded later. If all are unloaded,
    nothing is sent.
    """
    layout = _layout_of(group, communicator)
    by_name = {sites.name: sites for sites in group}
    ordered = [by_name[slot.name] for slot in layout.slots]
    dtype, trainable = group[0].stored_dtype, group[0].parameter.requires_grad
    residence, shard = offloaded or (
        None,
        torch.empty(layout.shard_numel, dtype=dtype, device=device),
    )
    bare = unloaded.issuperset(by_name)
    if not bare:
        blank = torch.zeros((), dtype=dtype)

        def value(index: int) -> Tensor:
            sites = ordered[index]
            return (
                blank.expand(sites.stored_shape)
                if sites.name in unloaded
                else sites.to_store(device)
            )

        here = shard if shard.device == device else torch.empty_like(shard, device=device)
        scatter_parameters(here, layout, communicator, value if is_first(communicator) else None)
        if here is not shard:
            shard.copy_(here)
    parameter = nn.Parameter(shard, requires_grad=trainable)
    # all of them, or none
    quantized = [sites for sites in ordered if isinstance(sites, QuantizedSites)]
    if quantized:
        chunk = quantized_chunk_of(residence, device, layout, parameter, communicator, quantized)
    else:
        chunk = chunk_of(residence, device, layout, parameter, communicator, policy)
    if bare:  # the loader will write everything except the padding
        shard[max(0, layout.numel - chunk.index * layout.shard_numel) :].zero_()
    chunk.unloaded = {index for index, sites in enumerate(ordered) if sites.name in unloaded}
    return chunk, ordered
