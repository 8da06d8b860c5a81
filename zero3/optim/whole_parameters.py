"""Cuts chunks anew, so that each parameter that an optimizer needs whole lies on one rank, and
blocks of others' quantised state are those of the uncut parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..build.axes import chunk_of
from ..build.host import host_of, memory_for
from ..comm.agreement import agree, agreeing
from ..core.chunk import Chunk, Placement
from ..core.layer_state import LayerState
from ..core.layout import ChunkLayout, Slot
from ..guards.marks import mark
from ..policy import dtypes_kept
from .cuts import aligned, deal, dealt
from .pieces import Choices, retire

__all__: list[str] = []

# If the parameters that may be cut have at most one sixteenth of a family's elements, they are kept
# whole too. So a layer's norms and biases share a chunk with its whole matrices, and the layer
# makes no more transfers than before.
RIDES_ALONG = 16


@dataclass(eq=False)
class Family:
    """A layer's trainable parameters of one dtype: one chunk is cut, another has whole ones."""

    state: LayerState
    chunks: list[Chunk]
    slots: list[Slot]  # in the order of the model
    # the slots that will not train; None: training does not change
    frozen: frozenset[str] | None = None


def families(
    states: Sequence[LayerState], places: Mapping[tuple[LayerState, str], int]
) -> list[Family]:
    """Returns the families of all layers.

    `places` tells slots' places in the model. So cuts depend on the model alone, and not on earlier
    cuts.
    """
    found: dict[tuple[LayerState, object, torch.dtype, torch.dtype], list[Chunk]] = {}
    for state in states:
        for chunk in state.chunks:
            if chunk.shard.requires_grad:
                kind = chunk if chunk.in_part else chunk.parts.trained_at_first
                key = state, kind, chunk.shard.dtype, chunk.own_dtype
                found.setdefault(key, []).append(chunk)
    result = []
    for (state, *_), chunks in found.items():
        slots = [slot for chunk in chunks for slot in chunk.layout.slots]
        slots.sort(key=lambda slot: places[state, slot.name])
        result.append(Family(state, chunks, slots))
    return result


def new_cuts(found: Sequence[Family], choices: Choices) -> list[tuple[Family, list[ChunkLayout]]]:
    """The families whose layouts change, with new ones. Owners are balanced over the model."""
    found = [family for family in found if not family.chunks[0].in_part]  # their cuts stay
    world_size = found[0].state.communicator.shards if found else 1
    if world_size == 1:
        return []  # a single rank has every parameter whole
    whole = [_dealt(family, choices) for family in found]
    sizes = [slot.numel for slots in whole for slot in slots]
    dealt_to = deal(sizes, world_size)
    owners, loads = iter(dealt_to), [0] * world_size
    for owner, numel in zip(dealt_to, sizes, strict=True):
        loads[owner] += numel
    wanted = []
    for family, slots in zip(found, whole, strict=True):
        rest = [slot for slot in family.slots if slot not in slots]
        aligns = [choices[family.state, slot.name].align for slot in rest]
        layouts = []
        if any(aligns):
            named = zip(rest, aligns, strict=True)
            layouts.append(
                aligned([(slot.name, slot.shape, n) for slot, n in named], world_size, loads)
            )
            loads = [load + layouts[0].chunk_numel(rank) for rank, load in enumerate(loads)]
        elif rest or not slots:
            layouts.append(
                ChunkLayout.build([(slot.name, slot.shape) for slot in rest], world_size)
            )
        if slots:
            named_slots = [(slot.name, slot.shape) for slot in slots]
            layouts.append(dealt(named_slots, [next(owners) for _ in slots], world_size))
        as_made = len(family.chunks) == 1 and family.chunks[0].layout.bounds is None
        before = [chunk.layout for chunk in family.chunks]
        if layouts != before and not (as_made and not slots and not any(aligns)):
            wanted.append((family, layouts))
    return wanted


def _dealt(family: Family, choices: Choices) -> list[Slot]:
    whole = [slot for slot in family.slots if choices[family.state, slot.name].whole]
    total = sum(slot.numel for slot in family.slots)
    rest = total - sum(slot.numel for slot in whole)
    return family.slots if whole and rest * RIDES_ALONG <= total else whole


def repartition(wanted: Sequence[tuple[Family, list[ChunkLayout]]]) -> None:
    """Gives families their new chunks. One old chunk at a time is gathered. On all ranks either
    every family changes, or none does.

    The old and the new chunks exist together until all are filled. That takes as much memory as
    gradients do in training.
    """
    if not wanted:
        return
    first = wanted[0][0].state
    with agreeing(first, "the memory for chunks that are cut anew"):
        made = [_empty_chunks(family, layouts) for family, layouts in wanted]
    for (family, _), chunks in zip(wanted, made, strict=True):
        family.state.release()  # a layer may be kept fetched for its backward
        _fill(family, chunks)
    agree(first, "the gathering of chunks that are cut anew", [])
    for (family, _), chunks in zip(wanted, made, strict=True):
        _exchange(family, chunks)


def _empty_chunks(family: Family, layouts: list[ChunkLayout]) -> list[Chunk]:
    state, old = family.state, family.chunks[0]
    made = []
    with torch.inference_mode(False):
        for layout in layouts:
            trains = family.frozen is None or layout.slots[0].name not in family.frozen
            place = host_of(state.communicator).place_for(state.policy, state.device)
            numel = layout.chunk_numel(old.index)
            stored = old.shard.dtype
            kept = dtypes_kept(state.policy, stored, old.compute_dtype) if trains else []
            values = memory_for(place, numel, stored, state.device, kept)
            shard = nn.Parameter(values.zero_(), requires_grad=trains)
            where = place, state.device
            # the layer's own may be that of experts, whose slices are in another order
            whole = Placement.of(layout, old.whole.communicator)
            made.append(chunk_of(whole, shard, where, state.policy, old.face))
    return made


@torch.no_grad()
def _fill(family: Family, chunks: list[Chunk]) -> None:
    for old in family.chunks:
        old.show_whole(as_stored=True)
        old.make_room()
        family.state.chunks.gather_again(old)
        try:
            old.finish_fetch()
            views = {
                slot.name: view for slot, view in zip(old.layout.slots, old.views, strict=True)
            }
            for chunk in chunks:
                for piece in chunk.pieces:
                    if piece.slot.name in views:
                        chunk.shard.data[piece.place].copy_(
                            views[piece.slot.name].reshape(-1)[piece.start : piece.stop]
                        )
        finally:
            old.abandon_fetch()
            old.release()


def _exchange(family: Family, chunks: list[Chunk]) -> None:
    """Puts the new chunks in place. It makes no transfer and no large allocation, so it can't fail
    on one rank alone.
    """
    state = family.state
    unloaded = {old.layout.slots[index].name for old in family.chunks for index in old.unloaded}
    for chunk in chunks:
        chunk.unloaded.update(
            index for index, slot in enumerate(chunk.layout.slots) if slot.name in unloaded
        )
        if family.frozen is None:
            chunk.parts.descend_from(family.chunks[0].parts)
        mark(chunk.shard, state)
        # so that older graphs, whose buffers are gone, raise
        torch.autograd.graph.increment_version(chunk.shard)
    if family.frozen is not None:
        for sharded in state.parameters:
            if sharded.chunk in family.chunks:  # first, because hooks go on parameters that train
                sharded.sites.parameter.requires_grad_(sharded.sites.name not in family.frozen)
    at = state.chunks.index(family.chunks[0])
    kept = [chunk for chunk in state.chunks if chunk not in family.chunks]
    state.replace_chunks([*kept[:at], *chunks, *kept[at:]])
    for old in family.chunks:
        retire(old, state.label)
    family.chunks = chunks
