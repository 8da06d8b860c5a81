"""The parts of a sharded model by the unwrapped model's names, and the ranges of them that this
rank holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..access import sharded_in, states_of
from ..comm.communicator import is_first
from ..comm.plain_values import name_of
from ..core.chunk import Chunk
from ..core.layer_state import LayerState
from ..core.layout import Piece
from ..core.parameters import ShardedParameter
from ..faces.quantised import weight_of
from ..names import named_tensors
from ..quantized.sections import StoredRows

__all__: list[str] = []

_DTYPES = (
    "A model's dtypes are decided when it is sharded, by its own, by master_dtype and by what "
    "trains then: shard as the run that saved did, and change what trains by zero3.set_trainable"
)
_FORMATS = (
    "ShardingPolicy(quantize=) decides how frozen parameters are stored: give the model the one of "
    "the run that saved. To change it, pass what zero3.full_state_dict makes of such a model to "
    "zero3.load_full_state_dict"
)


class NamedSpan(NamedTuple):
    """Elements `[start, stop)` of the flattened parameter `name`. They lie at `offset` in the
    tensor that holds them.
    """

    name: str
    start: int
    stop: int
    offset: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, flat: Tensor) -> Tensor:
        """Its elements of what holds them, `flat`, 1-D. A view."""
        return flat[self.offset : self.offset + self.numel]

    def in_blocks(self, length: int) -> NamedSpan:
        """Its blocks of `length` elements, among those of the flattened tensor."""
        return NamedSpan(self.name, self.start // length, -(-self.stop // length), 0)


class Contents:
    """Every parameter under its first name, and the tensors that are in no chunk: buffers, mostly.
    Raises RuntimeError if the call is inside `full_params` or `resident`, where the chunks may not
    hold the latest values.
    """

    def __init__(self, model: nn.Module, doing: str, *, as_values: bool = False) -> None:
        """`as_values`: shapes and dtypes of quantised parameters are those of their values, not of
        what is stored.
        """
        self._as_values = as_values
        self.states: list[LayerState] = states_of(model)
        self.communicator = self.states[0].communicator
        self.device, self.world_size = self.states[0].device, self.communicator.world_size
        self.number = self.communicator.rank  # of this rank's files
        self.is_first = is_first(self.communicator)
        # whether this rank's chunks are saved: other replicas hold the same
        self.writes = self.communicator.replica == 0
        check_released(self.states, doing)
        self.names: dict[int, list[str]] = {}  # by the tensor's id; a tied tensor has several names
        self.others: dict[str, Tensor] = {}
        self.parameters: dict[str, ShardedParameter] = {}
        owned = sharded_in(self.states)
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

    def rename(self, new: Mapping[str, str]) -> None:
        """Gives tensors names of another model, and forgets those that have none there."""
        kept = {key: [new[n] for n in names if n in new] for key, names in self.names.items()}
        self.names = {key: names for key, names in kept.items() if names}
        self.parameters = {new[n]: each for n, each in self.parameters.items() if n in new}
        self.others = {new[n]: tensor for n, tensor in self.others.items() if n in new}
        self._chunk_names = {
            chunk: {slot: new[n] for slot, n in names.items() if n in new}
            for chunk, names in self._chunk_names.items()
        }

    def spans(self, chunk: Chunk) -> list[NamedSpan]:
        """Returns the spans of this rank's chunk in order. Empty parameters belong to the chunk's
        first holder.
        """
        names = self._chunk_names.get(chunk, {})
        pieces = [piece for piece in chunk.pieces if piece.slot.name in names]
        found = [NamedSpan(names[p.slot.name], p.start, p.stop, p.offset) for p in pieces]
        empty = self.empties(chunk) if chunk.is_first_holder else []
        return found + [span for span in empty if span is not None]

    def empties(self, chunk: Chunk) -> list[NamedSpan | None]:
        """Returns a span for each empty parameter, in the order of slots, or None where the model
        has no name for it.
        """
        names = self._chunk_names.get(chunk, {})
        return [
            NamedSpan(names[slot.name], 0, 0, 0) if slot.name in names else None
            for slot in chunk.layout.slots
            if not slot.numel
        ]

    def names_in(self, chunk: Chunk) -> list[str]:
        """The names of all parameters with elements in the chunks of all ranks, in order."""
        names = self._chunk_names.get(chunk, {})
        return [
            names[slot.name] for slot in chunk.layout.slots if slot.numel and slot.name in names
        ]

    def chunks(self) -> Iterator[Chunk]:
        for state in self.states:
            yield from state.chunks

    def share(self, numel: int) -> tuple[int, int]:
        """Of so many elements, which are all here, those that this rank writes: from and to."""
        return numel * self.number // self.world_size, numel * (self.number + 1) // self.world_size

    def knows(self, name: str) -> bool:
        return name in self.parameters or name in self.others

    def check_loaded(self, names: Iterable[str], doing: str) -> None:
        """Raises RuntimeError if tensors have no values."""
        missing = [name for name in names if self.is_empty(name)]
        if missing:
            raise RuntimeError(
                f"{doing}: {', '.join(missing)} have no values yet (meta device): load them before"
            )

    def is_empty(self, name: str) -> bool:
        """Whether the tensor was made on the meta device, and has no values yet."""
        if name in self.others:
            return self.others[name].is_meta
        return self.parameters[name].index in self.parameters[name].chunk.unloaded

    def trains(self, name: str) -> bool:
        """Whether an optimizer may change the tensor."""
        if name in self.parameters:
            return self.parameters[name].chunk.shard.requires_grad
        return self.others[name].requires_grad

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of what is stored: the parameter's own or, if it is quantised, `[bytes]`."""
        if name in self.others:
            return tuple(self.others[name].shape)
        sharded = self.parameters[name]
        if self._as_values:
            return tuple(sharded.stand_in.shape)
        return sharded.chunk.layout.slots[sharded.index].shape

    def rows(self, name: str) -> StoredRows | None:
        """Where a parameter lies that is quantised and stored in rows. None: it is neither."""
        weight = weight_of(self.parameters[name].sites) if name in self.parameters else None
        return None if weight is None or weight.rows.count == 1 else weight.rows

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which the tensor is stored. Layers may compute in another dtype."""
        if name in self.others:
            return self.others[name].dtype
        weight = weight_of(self.parameters[name].sites)
        if self._as_values and weight is not None:
            return weight.own_dtype
        return self.parameters[name].chunk.shard.dtype

    def own_dtype(self, name: str) -> torch.dtype:
        """The dtype that the tensor has in the model, of which a chunk may hold a master copy."""
        sharded = self.parameters.get(name)
        if sharded is None or sharded.chunk.read_only:
            return self.dtype(name)
        return sharded.chunk.own_dtype

    def description(self) -> dict[str, Any]:
        """Returns each tensor's shape, dtype and, if it is tied, other names, for the manifest. It
        is the same on every rank.
        """
        described: dict[str, Any] = {}
        for name, *aliases in self.names.values():
            described[name] = {"shape": list(self.shape(name)), "dtype": name_of(self.dtype(name))}
            described[name] |= {"also": aliases} if aliases else {}
            if name in self.parameters and self.parameters[name].chunk.read_only:
                sharded = self.parameters[name]
                stored = f"{sharded.chunk.stored_as} of {list(sharded.stand_in.shape)}"
                described[name]["quantized"] = stored
        return described


def check_released(states: Iterable[LayerState], doing: str) -> None:
    """Raises RuntimeError inside `full_params` or `resident`."""
    if pinned := next((state for state in states if state.pinned), None):
        raise RuntimeError(
            f"{doing} inside full_params or resident: layer {pinned.label} is whole there. Call "
            "it before or after."
        )


def piece_of(sharded: ShardedParameter) -> Piece | None:
    """What this rank's chunk holds of the parameter. None: nothing."""
    layout = sharded.chunk.layout
    return layout.piece(layout.slots[sharded.index], sharded.chunk.index)


def listed(problems: Mapping[str, Sequence[str]]) -> list[str]:
    """Returns a text for each kind of problem that has items: "missing: a, b"."""
    return [f"{kind}: {', '.join(items)}" for kind, items in problems.items() if items]


def names_apart(expected: Mapping[str, object], found: Mapping[str, object]) -> list[str]:
    """Returns in words which names are missing, and which are unknown."""
    missing = [name for name in expected if name not in found]
    unknown = [name for name in found if name not in expected]
    return listed({"missing": missing, "unknown": unknown})


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Returns in words how two descriptions differ, or [] if they are alike."""
    problems = names_apart(expected, found)
    common = [n for n in expected if n in found]
    for what, many in (("quantized", "formats"), ("shape", "shapes"), ("dtype", "dtypes")):
        other = [n for n in common if found[n].get(what) != expected[n].get(what)]
        if what == "quantized":  # what is stored has the format's shape and dtype
            common = [n for n in common if n not in other]
        if other:
            each = (
                f"{n} has {_shown(found[n].get(what))}, expected {_shown(expected[n].get(what))}"
                for n in other
            )
            problems.append(f"other {many}: {'; '.join(each)}")
            problems += {"quantized": [_FORMATS], "dtype": [_DTYPES]}.get(what, [])
    return problems


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return str(tuple(value)) if isinstance(value, list) else str(value)
