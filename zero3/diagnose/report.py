"""report(): how much memory a sharded model takes, by dtype or format, in one line."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import compress

from torch import nn

from ..access import states_of
from ..core.full_buffer import Lifetime
from ..core.layer_state import LayerState, chunks_of
from ..core.layout import megabytes
from ..experts.at_home import AtHome
from ..layer import state_behind, states_in
from ..policy import (
    ShardingPolicy,
    gather_format,
    gradient_dtype,
    landed_dtype,
    reduce_format,
    shards_gradients,
)
from ..quantized.wire import is_stochastic
from ..sequences.parts import parts_of
from ..tables import table
from ..towers.entering import towers_of

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class Report:
    """The memory that one rank holds for a model, in bytes, without the optimizer's state.
    `str(report)` is one line to print.

    Attributes:
        rank: The rank that made the report.
        world_size: The number of ranks.
        shards: The number of ranks over which a chunk is cut: on a mesh with replicas fewer than
            `world_size`.
        layers: The number of layers, the root's own included.
        parameters: Elements of the whole model, trainable and frozen.
        chunks: Bytes by kind and dtype or format, such as `"trainable float32"` and `"frozen
            nf4(64, double)"`.
        gradients: Bytes of the trainable chunks' gradients.
        rests: Where chunks and gradients rest: `"memory"` of the device that computes, `"host
            memory"` beside an accelerator, `"files"`.
        gathered: Bytes of all layers' full buffers by dtype or format. A step holds only
            `full_parameters` of them at once.
        full_parameters: The most bytes of full buffers that a step may hold at once, the root's
            own among them. It assumes that the largest layers follow each other.
        full_gradients: The most bytes of full gradients that a step may hold at once. Where they
            travel from one buffer (NCCL, `stage=1`), those of the layer that is copied into it are
            there twice for a moment: docs/memory.md has them as `P_i`.
        transfers: What travels rounded to a format, and whether that is a bias: a text for each
            kind of transfer. Empty if all is exact.
        policies: The distinct policies, as text.
        largest_layer: The name of the largest layer; of those beside the root's own, where there
            are any.
        largest_layer_bytes: Bytes of its full parameters.
        experts: How many experts stay at home on this rank, and how many the model has, over all of
            its layers with `expert_parallel`. They have no full buffers and no full gradients.
        parts: The number of ranks that hold parts of the same sequences.
        towers: The names of what not every rank need call: `optional` of `shard`.
        root_bytes: Bytes of the root's own layer's full parameters, which stay from forward to the
            end of backward. None without `shard`.
    """

    rank: int
    world_size: int
    shards: int
    layers: int
    parameters: int
    chunks: dict[str, int]
    gradients: int
    rests: tuple[str, ...]
    gathered: dict[str, int]
    full_parameters: int
    full_gradients: int
    transfers: tuple[str, ...]
    policies: tuple[str, ...]
    largest_layer: str
    largest_layer_bytes: int
    experts: tuple[int, int]
    parts: int
    towers: tuple[str, ...]
    root_bytes: int | None

    def __str__(self) -> str:
        root = mesh = ""
        if self.root_bytes is not None:
            root = f", the root's own holds {megabytes(self.root_bytes)}"
        if self.shards < self.world_size:
            mesh = f" ({self.world_size // self.shards} replicas of {self.shards} shards)"
        here, everywhere = self.experts
        experts = f"{here} of {everywhere} experts stay here, tokens travel. " if everywhere else ""
        sequences = (
            f"It holds parts of sequences over {self.parts} ranks. " if self.parts > 1 else ""
        )
        towers = f"Not every rank need call {', '.join(self.towers)}. " if self.towers else ""
        rests = f" in {' and '.join(self.rests)}" if self.rests != ("memory",) else ""
        stored = ", ".join(f"{kind} {megabytes(nbytes)}" for kind, nbytes in self.chunks.items())
        return (
            f"zero3: rank {self.rank} of {self.world_size}{mesh}, {self.parameters / 1e6:.1f} M "
            f"parameters in {self.layers} layers. Chunks{rests}: {stored or 'none'}; gradients: "
            f"{megabytes(self.gradients)}. Computes in {', '.join(self.gathered) or 'nothing'}; a "
            f"step holds up to {megabytes(self.full_parameters)} of full parameters and "
            f"{megabytes(self.full_gradients)} of full gradients. The largest layer is "
            f"{self.largest_layer} with {megabytes(self.largest_layer_bytes)}{root}. "
            f"{experts}{sequences}{towers}{''.join(f'{text}. ' for text in self.transfers)}"
            f"{'; '.join(self.policies)}"
        )

    def _repr_html_(self) -> str:
        chunks = [(f"chunks, {kind}", megabytes(nbytes)) for kind, nbytes in self.chunks.items()]
        gathered = [(f"gathered as {kind}", megabytes(n)) for kind, n in self.gathered.items()]
        rows = [
            ("parameters", f"{self.parameters:,} in {self.layers} layers"),
            *chunks,
            ("gradients", megabytes(self.gradients)),
            ("chunks and gradients rest in", " and ".join(self.rests)),
            *gathered,
            ("a step holds, of full parameters, up to", megabytes(self.full_parameters)),
            ("a step holds, of full gradients, up to", megabytes(self.full_gradients)),
            ("largest layer", f"{self.largest_layer}, {megabytes(self.largest_layer_bytes)}"),
        ]
        if self.root_bytes is not None:
            rows.append(("the root's own layer", megabytes(self.root_bytes)))
        if any(self.experts):
            rows.append(("experts that stay here", "{} of {}".format(*self.experts)))
        title = f"zero3: rank {self.rank} of {self.world_size}, {self.shards} shards"
        return table(title, rows, notes=[*self.transfers, *self.policies])


def report(model: nn.Module) -> Report:
    """Tells how much memory this rank holds for a model, and how much a step adds. It makes no
    collective.

    Args:
        model: Any model that contains zero3 layers.

    Returns:
        A `Report`.

    Raises:
        ValueError: Nothing in `model` is sharded.

    Example::

        print(zero3.report(model))
    """
    states = states_of(model)
    first = states[0]
    roots = {id(root) for module in model.modules() if (root := vars(module).get("_zero3_root"))}
    parts = parts_of(model)
    largest = max(states, key=lambda state: (id(state) not in roots, state.chunks.full_nbytes()))
    chunks, gathered = Counter[str](), Counter[str]()
    gradients = 0
    for state in states:
        for chunk in state.chunks:
            kind = f"{'trainable' if chunk.shard.requires_grad else 'frozen'} {chunk.stored_as}"
            chunks[kind] += chunk.store.taken(chunk.shard.nbytes)
            gathered[chunk.gathered_as] += chunk.full_nbytes
            if chunk.shard.requires_grad:
                itemsize = landed_dtype(state.policy, chunk.shard.dtype).itemsize
                gradients += chunk.store.taken(chunk.shard.numel() * itemsize)
    rests = dict.fromkeys(chunk.store.name for chunk in chunks_of(states))
    outer = _outer(model)
    homes = [state.call for state in states if isinstance(state.call, AtHome)]
    of_roots = [state.chunks.full_nbytes() for state in states if id(state) in roots]
    return Report(
        rank=first.communicator.rank,
        world_size=first.communicator.world_size,
        shards=first.communicator.shards,
        layers=len(states),
        parameters=sum(each.stand_in.numel() for state in states for each in state.parameters),
        chunks=dict(chunks),
        gradients=gradients,
        rests=tuple(rests) or ("memory",),
        gathered=dict(gathered),
        full_parameters=_full_parameters(states, outer),
        full_gradients=_full_gradients(states, outer),
        transfers=_rounded(states),
        policies=tuple(dict.fromkeys(repr(state.policy) for state in states)),
        largest_layer=largest.label,
        largest_layer_bytes=largest.chunks.full_nbytes(),
        experts=(sum(home.end - home.first for home in homes), sum(home.experts for home in homes)),
        parts=1 if parts is None else parts.size,
        towers=towers_of(model),
        root_bytes=sum(of_roots) if roots else None,
    )


def _rounded(states: list[LayerState]) -> tuple[str, ...]:
    found: list[str] = []
    for state in states:
        for dtype in {chunk.shard.dtype for chunk in state.chunks if chunk.shard.requires_grad}:
            if (kind := gather_format(state.policy, state.communicator, dtype)) is not None:
                found.append(
                    f"Weights travel as {kind.name}, and what computes is rounded to it: that is "
                    "a bias"
                )
            if (kind := reduce_format(state.policy, state.communicator, dtype)) is not None:
                how = (
                    "at random, without a bias"
                    if is_stochastic(kind)
                    else "to the nearest code: that is a bias"
                )
                found.append(f"Gradients travel as {kind.name}, rounded {how}")
    return tuple(dict.fromkeys(found))


def _outer(model: nn.Module) -> set[LayerState]:
    """The layers around others, such as the root's own. They stay for a whole pass."""
    found = ((state_behind(module), states_in(module)) for module in model.modules())
    return {state for state, inside in found if state is not None and {*inside} - {state}}


def _full_parameters(states: list[LayerState], outer: set[LayerState]) -> int:
    sizes = [sum(c.full_nbytes for c in state.chunks if not c.resident) for state in states]
    stays = [state in outer or state.behaviour.lifetime > Lifetime.CALL for state in states]
    frozen = (chunk for chunk in chunks_of(states) if not chunk.shard.requires_grad)
    stay_frozen = sum(chunk.full_nbytes for chunk in frozen if not chunk.resident)
    policy: ShardingPolicy = states[0].policy
    return min(
        sum(sizes),
        _at_once(states, sizes, stays, policy.prefetch_depth + 1)
        + min(stay_frozen, policy.resident_bytes),
    )


def _full_gradients(states: list[LayerState], outer: set[LayerState]) -> int:
    """One is on its way while the next is made, also if nothing is fetched ahead."""
    sizes = list(map(_gradient_nbytes, states))
    stays = [state in outer or not shards_gradients(state.policy) for state in states]
    return _at_once(states, sizes, stays, max(states[0].policy.prefetch_depth, 1) + 1)


def _gradient_nbytes(state: LayerState) -> int:
    return sum(
        chunk.at.layout.padded_numel * gradient_dtype(state.policy, chunk.compute_dtype).itemsize
        for chunk in state.chunks
        if chunk.shard.requires_grad and not (chunk.in_part and chunk.at.layout.world_size == 1)
    )


def _at_once(states: list[LayerState], sizes: list[int], stays: list[bool], moving: int) -> int:
    """The sizes of the largest layers, so many as are held at once, and of all layers that stay, as
    those do that are called as several modules.
    """
    whole = [each or state.behaviour.modules > 1 for each, state in zip(stays, states, strict=True)]
    passing = sorted(size for size, each in zip(sizes, whole, strict=True) if not each)
    return sum(passing[-moving:]) + sum(compress(sizes, whole))
