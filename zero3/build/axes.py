"""Picks the values on the axes of a new chunk, and the stages of its gradients."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import nn

from ..comm.communicator import Communicator, averages
from ..comm.errors import Subject
from ..core.account import Account
from ..core.chunk import Chunk, Placement, Plain, Wire
from ..core.flow import Add, Among, Average, Flow, ReduceScatter, Stage
from ..core.gradient_buffer import GradientBuffer
from ..core.layer_gradients import LayerGradients
from ..core.layout import ALIGNMENT_NUMEL, GradientLayout
from ..core.sites import Face, Views
from ..policy import (
    ShardingPolicy,
    compute_dtype,
    directory_of,
    gather_format,
    gradient_dtype,
    landed_dtype,
    reduce_format,
    shards_gradients,
)
from ..slices import typed
from ..stages.replicas import KeepInReplica, SumReplicas
from ..stores.files import PutAway
from ..stores.here import Here
from ..stores.resting import Home, Keeping, Resting, resting_place
from ..wires.coded import Coded, CodedReduceScatter

__all__: list[str] = []

# dtypes whose exponents reach so far that a mean underflows where its sum nearly does
_WIDE = (torch.float64, torch.float32, torch.bfloat16)


def chunk_of(
    whole: Placement,
    shard: nn.Parameter,
    where: tuple[Resting | None, torch.device],
    policy: ShardingPolicy,
    face: Face | None = None,
    at: Placement | None = None,
) -> Chunk:
    """A new chunk. `where`: it rests, None if it is where its layer computes; and where that is.
    `face`: None if parameters are views of the full buffer. `at`: see `Chunk`.
    """
    (place, device), stored, face = where, shard.dtype, face or Views()
    plain = face.read_only or at is not None
    kind = None if plain else gather_format(policy, whole.communicator, stored)
    wire: Wire = Plain() if kind is None else Coded(kind, whole.layout, device)
    computes = stored if face.read_only else compute_dtype(policy, face.own or stored)
    store = Here() if place is None else place
    chunk = Chunk(whole, shard, (computes, device), store, wire, face, at)
    if place is not None:
        place.belong_to(chunk)
    return chunk


def gradients_of(
    communicator: Communicator, over: Communicator, policy: ShardingPolicy, subject: Subject
) -> LayerGradients:
    """The gradients of a new layer. `over`: the ranks that sum them."""

    def new_account(chunk: Chunk, among: Among) -> Account:
        return account_of(chunk, among, policy, subject)

    def handed_over_in(computes: torch.dtype) -> torch.dtype | None:
        return None if policy.grad_dtype is None else gradient_dtype(policy, computes)

    return LayerGradients(
        communicator, subject, new_account, handed_over_in, over, waits=not shards_gradients(policy)
    )


def account_of(chunk: Chunk, among: Among, policy: ShardingPolicy, subject: Subject) -> Account:
    """A chunk's account, whose gradients go the way that the policy says."""
    communicator, stored = chunk.at.communicator, chunk.shard.dtype
    lands, mean = landed_dtype(policy, stored), policy.gradient_reduction == "mean"
    chunk.shard.grad_dtype = lands
    kind = None if chunk.in_part else reduce_format(policy, communicator, stored)
    sums = gradient_dtype(policy, chunk.compute_dtype)
    # fp16 overflows at 65504, so a part of the division for the mean is done before the sum
    early = mean and kind is None and sums == torch.float16
    first = 1 << (communicator.world_size.bit_length() - 1) // 2 if early else 1
    trailer = _trailer(chunk, communicator) if kind is None else 0
    layout = GradientLayout(chunk.at.layout, trailer)
    averaged = mean and kind is None and sums in _WIDE and layout.bounds is None
    averaged = averaged and averages(communicator)
    stages: list[Stage] = [
        ReduceScatter(layout.bounds, sums, divides_first=first, averages=averaged)
        if kind is None
        else CodedReduceScatter(kind, chunk, communicator, subject)
    ]
    if communicator.shards < communicator.world_size:
        stages += [KeepInReplica(), SumReplicas(averages=averaged)]
    divided = communicator.world_size if averaged else first
    stages.append(Average(lands, mean=mean, divided=divided))
    place = resting_place(chunk)
    if place is not None and place.far:
        stages.append(Home(place))
    keeps = place is not None and directory_of(policy) is not None
    stages.append(PutAway(cast(Keeping, place)) if keeps else Add())
    at_once = place is not None and place.at_once
    flow = Flow(*stages, typed=partial(typed, chunk, among), at_once=at_once)
    summed = sums if kind is None else torch.float32
    added = summed if summed.itemsize > lands.itemsize else lands
    ones = torch.empty(trailer, dtype=chunk.compute_dtype, device=chunk.device)
    if trailer:
        ones.fill_(1)
    buffer = GradientBuffer(layout, sums, chunk.device, ones)
    return Account(chunk, flow, buffer, added, among, saves=policy.transactional)


def _trailer(chunk: Chunk, communicator: Communicator) -> int:
    """The elements behind each slice: one for each slot. On an accelerator slices begin where
    vectorised kernels need it. Integers, and floats of fewer than 16 bits, get no gradients. A part
    of the values is computed with for all ranks, and counts as reached.
    """
    dtype = chunk.own_dtype
    trainable = dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1)
    if communicator.world_size == 1 or chunk.in_part or not trainable:
        return 0
    slots, on_host = (
        len(chunk.layout.slots),
        chunk.device.type == "cpu" or communicator.takes_pieces,
    )
    return slots if on_host else -(-slots // ALIGNMENT_NUMEL) * ALIGNMENT_NUMEL
