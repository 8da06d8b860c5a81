"""What a sharded model is made of, by the unwrapped model's names, and which ranges of it this rank holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..access import states_of
from ..comm.plain_values import name_of
from ..core.chunk import Chunk
from ..core.layer_state import LayerState
from ..core.parameters import ShardedParameter
from ..names import named_tensors

__all__: list[str] = []


class Span(NamedTuple):
    """Elements `[start, stop)` of the flattened parameter `name`; they lie at `offset` in whatever holds them."""

    name: str
    start: int
    stop: int
    offset: int


class Contents:
    """Every parameter under its first name, and what no chunk holds: buffers, mostly.

    Raises:
        RuntimeError: inside `full_params` or `resident`, where values may stand elsewhere than in the chunks.
    """

    def __init__(self, model: nn.Module, doing: str) -> None:
        self.states: list[LayerState] = states_of(model)
        self.communicator = self.states[0].communicator
        self.rank, self.world_size, self.device = self.communicator.rank, self.communicator.world_size, self.states[0].device
        if pinned := next((state for state in self.states if state.pinned), None):
            raise RuntimeError(f"{doing} inside full_params or resident: layer {pinned.label} is whole there. Call it before or after.")
        self.names: dict[int, list[str]] = {}  # of a tensor, by its id; tied ones have several
        self.others: dict[str, Tensor] = {}
        self.parameters: dict[str, ShardedParameter] = {}
        owned = {id(sharded.sites.parameter): sharded for state in self.states for sharded in state.parameters}
        self._chunk_names: dict[Chunk, dict[str, str]] = {}
        for name, tensor in named_tensors(model):
            if id(tensor) not in self.names:
                if (sharded := owned.get(id(tensor))) is not None:
                    self.parameters[name] = sharded
                    slot = sharded.chunk.layout.slots[sharded.index]
                    self._chunk_names.setdefault(sharded.chunk, {})[slot.name] = name
                else:
                    self.others[name] = tensor
            self.names.setdefault(id(tensor), []).append(name)

    def spans(self, chunk: Chunk, rank: int | None = None) -> list[Span]:
        """What a rank's chunk holds (None: this one's), in order. Empty parameters belong to the first rank that holds anything."""
        rank = self.rank if rank is None else rank
        names = self._chunk_names.get(chunk, {})
        pieces = [piece for piece in chunk.layout.pieces(rank) if piece.slot.name in names]
        found = [Span(names[piece.slot.name], piece.start, piece.stop, piece.offset) for piece in pieces]
        return found + [span for span in self.empties(chunk) if rank == chunk.layout.first_holder and span is not None]

    def empties(self, chunk: Chunk) -> list[Span | None]:
        """Of its empty parameters, in the order of its slots; None for one that the model has no name for."""
        names = self._chunk_names.get(chunk, {})
        return [Span(names[slot.name], 0, 0, 0) if slot.name in names else None for slot in chunk.layout.slots if not slot.numel]

    def chunks(self) -> Iterator[Chunk]:
        for state in self.states:
            yield from state.chunks

    def knows(self, name: str) -> bool:
        return name in self.parameters or name in self.others

    def trains(self, name: str) -> bool:
        """Whether an optimizer may change it."""
        if name in self.parameters:
            return self.parameters[name].chunk.shard.requires_grad
        return self.others[name].requires_grad

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.others[name].shape if name in self.others else self.parameters[name].stand_in.shape)

    def dtype(self, name: str) -> torch.dtype:
        """As it is stored; layers may compute in another."""
        return self.others[name].dtype if name in self.others else self.parameters[name].chunk.shard.dtype

    def description(self) -> dict[str, Any]:
        """Name to shape and dtype, and its other names if it is tied: as a manifest has it, the same on every rank."""
        described: dict[str, Any] = {}
        for name, *aliases in self.names.values():
            described[name] = {"shape": list(self.shape(name)), "dtype": name_of(self.dtype(name))}
            described[name] |= {"also": aliases} if aliases else {}
        return described


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What of two descriptions does not fit, in words; no words if all does. A tied parameter may be known by any of its names."""
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing: {', '.join(missing)}")
    if unknown := [name for name in found if name not in expected]:
        problems.append(f"unknown: {', '.join(unknown)}")
    for what in ("shape", "dtype"):
        other = [n for n in expected if n in found and found[n][what] != expected[n][what]]
        if other:
            each = "; ".join(f"{name} has {_shown(found[name][what])}, expected {_shown(expected[name][what])}" for name in other)
            problems.append(f"other {what}s: {each}")
    return problems


def _shown(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)
