"""Changes of a layer's state outside forward and backward: pin it (keep it fetched), write values back, replace its chunks."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .chunk import Chunk
from .layer_state import LayerState
from .parameters import ShardedParameter, restore_order

__all__: list[str] = []


def pin(state: LayerState, *, to_compute: bool = False) -> None:
    """Fetches a layer until it is unpinned. `parameters()` yields its parameters, and not its chunks.

    `to_compute`: parameters are in the compute dtype, as in a forward. Otherwise they are in the chunks' dtype.
    """
    state.release()  # the values of a kept layer may be older than the last optimizer step
    stored = not to_compute and any(chunk.casts for chunk in state.chunks)
    if state.pins and stored != state.as_stored:
        raise RuntimeError(
            f"rank {state.communicator.rank}: zero3.full_params shows layer {state.label} as it is stored, zero3.resident in "
            f"param_dtype={state.policy.param_dtype}: leave one before you enter the other"
        )
    state.as_stored = stored
    try:
        state.start_fetch()
        state.finish_fetch()
    except BaseException:
        state.as_stored = False
        raise
    state.pins += 1
    if state.pins == 1:
        for name in state.chunk_names():
            state.registry.pop(name)
        restore_order([sharded.sites for sharded in state.parameters])


def pin_unloaded(state: LayerState) -> None:
    """Pins a layer for a loader, which will fill it: chunks without values count as loaded."""
    for chunk in state.chunks:
        chunk.unloaded.clear()
    meta_buffers, state.meta_buffers = state.meta_buffers, []
    pin(state)
    state.meta_buffers = meta_buffers


def unpin(state: LayerState) -> None:
    state.pins -= 1
    if not state.pins:
        state.registry.update(state.chunk_names())
        for chunk in state.chunks:
            chunk.leave_buffer()
        state.release()
        state.as_stored = False


def replace_chunks(state: LayerState, chunks: list[Chunk]) -> None:
    """Puts a released layer's parameters into other chunks. A backward through older graphs is an error."""
    places = {slot.name: (chunk, index) for chunk in chunks for index, slot in enumerate(chunk.layout.slots)}
    moved = [ShardedParameter(sharded.sites, *places[sharded.sites.name], sharded.stand_in) for sharded in state.parameters]
    state.parameters = sorted(moved, key=lambda sharded: (chunks.index(sharded.chunk), sharded.index))
    state.chunks = chunks
    state.versions = [sharded.sites.parameter._version for sharded in state.parameters]
    state.gradients.replace_chunks(chunks, state.parameters)


def write_back(state: LayerState) -> None:
    """Scatters rank 0's values of the fetched parameters into the chunks of all ranks."""
    for sharded in state.parameters:
        if sharded.sites.parameter.data_ptr() != sharded.value.data_ptr():  # the caller has set parameter.data
            sharded.value.copy_(sharded.sites.parameter.data)
    for chunk in state.chunks:
        chunk.scatter()


class Pin:
    """A layer that has just been pinned, and what its parameters were like then."""

    def __init__(self, state: LayerState) -> None:
        self.state = state
        parameters = [sharded.sites.parameter for sharded in state.parameters]
        self._before = [(parameter.requires_grad, parameter._version) for parameter in parameters]

    def undo_toggles(self) -> list[str]:
        """The parameters whose `requires_grad` was changed meanwhile; it is again what it was."""
        toggled = [each for each, (trained, _) in self._with_before() if each.sites.parameter.requires_grad != trained]
        for each in toggled:
            each.sites.parameter.requires_grad_(not each.sites.parameter.requires_grad)
        return [self._name(each) for each in toggled]

    def written(self) -> list[str]:
        """The parameters that were given other values, and will lose them, as far as this rank can tell."""
        found = []
        for each, (_, version) in self._with_before():
            parameter, chunk = each.sites.parameter, each.chunk
            if parameter.data_ptr() != each.value.data_ptr() or (parameter._version != version and not chunk.resident):
                found.append(self._name(each))
        rank = self.state.communicator.rank
        slots = [] if found else [name for chunk in self.state.chunks for name in _slots_written(chunk, rank)]
        return found or [f"{name!r} of layer {self.state.label}" for name in slots]

    def _with_before(self) -> Iterator[tuple[ShardedParameter, tuple[bool, int]]]:
        return zip(self.state.parameters, self._before, strict=True)

    def _name(self, sharded: ShardedParameter) -> str:
        return f"{sharded.sites.name!r} of layer {self.state.label}"


def _slots_written(chunk: Chunk, rank: int) -> list[str]:
    """The parameters whose values in this rank's slice of the full buffer are not its chunk's: writes by `.data` leave no other trace."""
    if chunk.resident:  # the chunk itself was written, and stays so
        return []
    low, high = chunk.layout.chunk_range(rank)
    shown = chunk.full.tensor[low:high]
    home = chunk.shard.data.to(shown.dtype)
    if torch.equal(_bits(shown), _bits(home)):
        return []
    spans = [(piece.slot.name, slice(piece.offset, piece.offset + piece.stop - piece.start)) for piece in chunk.layout.pieces(rank)]
    return [name for name, span in spans if not torch.equal(_bits(shown[span]), _bits(home[span]))]


def _bits(values: Tensor) -> Tensor:
    """Comparable whatever they are: NaN is unequal to itself."""
    return values.contiguous().view(torch.uint8)
