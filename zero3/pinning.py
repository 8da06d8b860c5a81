"""Pins layers outside forward and backward, which keeps them fetched, and writes values back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .core.layer_state import LayerState
from .core.parameters import ShardedParameter
from .modules import named

__all__: list[str] = []


def pin(state: LayerState, *, to_compute: bool = False) -> None:
    """Fetches a layer until it is unpinned. `parameters()` yields its parameters, and not its
    chunks.

    `to_compute`: parameters are in the compute dtype, as in a forward. Otherwise they are in the
    chunks' dtype.
    """
    state.release()  # the values of a kept layer may be older than the last optimizer step
    stored = not to_compute and any(chunk.casts for chunk in state.chunks)
    if state.pinned and stored != state.pins.as_stored:
        raise RuntimeError(
            f"rank {state.communicator.rank}: zero3.full_params shows layer {state.label} as it "
            f"is stored, zero3.resident in {state.behaviour.rounding}: leave one before you enter "
            "the other"
        )
    state.pin(as_stored=stored)


def pin_unloaded(state: LayerState) -> None:
    """Pins a layer for a loader, which will fill it: chunks without values count as loaded."""
    for chunk in state.chunks:
        chunk.unloaded.clear()
    meta_buffers = [*state.meta_buffers]
    state.meta_buffers.clear()
    pin(state)
    state.meta_buffers.extend(meta_buffers)


def write_back(states: Iterable[LayerState]) -> None:
    """Scatters rank 0's values of the fetched parameters into the chunks of all ranks."""
    for state in states:
        for sharded in state.parameters:
            # the caller has set parameter.data
            if sharded.sites.parameter.data_ptr() != sharded.value.data_ptr():
                sharded.value.copy_(sharded.sites.parameter.data)
        for chunk in state.chunks:
            chunk.scatter()
            if state.pins.number > 1:  # an outer context goes on showing parameters, on all ranks
                chunk.full.forget()
                state.chunks.gather_again(chunk)
                chunk.finish_fetch()


def refuse_to_write(states: Iterable[LayerState]) -> None:
    """Raises on every rank, since all have the same parameters, if a layer has quantised ones."""
    found = [
        f"{p.sites.name!r} of layer {state.label} ({p.chunk.stored_as})"
        for state in states
        for p in state.parameters
        if p.chunk.read_only
    ]
    if found:
        raise RuntimeError(
            f"full_params(writeback=True): {named(found)} would have to be quantised again, which "
            "loses more. Quantised parameters are read-only: call it for modules without them, "
            "load other values (zero3.load_full_state_dict), or merge adapters with "
            "zero3.save_merged."
        )


class Pin:
    """A layer that has just been pinned, and what its parameters were like then."""

    def __init__(self, state: LayerState, *, undone: bool) -> None:
        """`undone`: whether changes are undone at the end."""
        self.state = state
        self._trained = [sharded.sites.parameter.requires_grad for sharded in state.parameters]
        self._written = [chunk.shard._version for chunk in state.chunks]
        self._samples = (
            [_sample(sharded.sites.data()) for sharded in state.parameters] if undone else []
        )

    def undo_toggles(self) -> list[str]:
        """The parameters whose `requires_grad` was changed meanwhile; it is again what it was."""
        before = zip(self.state.parameters, self._trained, strict=True)
        toggled = [
            sharded
            for sharded, trained in before
            if sharded.sites.parameter.requires_grad != trained
        ]
        for sharded in toggled:
            sharded.sites.parameter.requires_grad_(not sharded.sites.parameter.requires_grad)
        return [self._name(sharded) for sharded in toggled]

    def replaced(self) -> list[str]:
        """The parameters in whose places other objects stand."""
        return [
            self._name(sharded) for sharded in self.state.parameters if sharded.sites.replaced()
        ]

    def written(self) -> list[str]:
        """The parameters that were given other values, and will lose them; not those that were
        changed back, but for rounding.
        """
        changed: list[str] = []
        # an inner context has written into the chunks
        if self._written != [chunk.shard._version for chunk in self.state.chunks]:
            return changed
        for sharded, before in zip(
            self.state.parameters, self._samples, strict=bool(self._samples)
        ):
            # on one rank the chunk itself may have been written
            stays = _sample(sharded.value) if sharded.chunk.resident else before
            if not _but_for_rounding(_sample(sharded.sites.data()), stays):
                changed.append(self._name(sharded))
        return changed

    def _name(self, sharded: ShardedParameter) -> str:
        return f"{sharded.sites.name!r} of layer {self.state.label}"


def _sample(values: Tensor) -> Tensor:
    """Some of a parameter's values, the same on all ranks: writes by `.data` leave no other
    trace.
    """
    flat = values.flatten()
    return flat[:: max(1, flat.numel() // 256)].clone()


def _but_for_rounding(found: Tensor, expected: Tensor) -> bool:
    """Whether they are equal, or as far apart as something added and taken away again leaves
    them.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if torch.equal(found, expected) or not expected.numel():
        return True
    if not expected.is_floating_point():
        return False
    here, there = found.double(), expected.double()
    apart = (here - there).masked_fill(here.isnan() & there.isnan(), 0)
    return bool(apart.norm() <= 16 * torch.finfo(expected.dtype).eps * there.nan_to_num().norm())
