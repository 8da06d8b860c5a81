"""Layers that get their first values from rank 0, each in memory only while something uses its
parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.chunk import Chunk
from ..core.flat import split, view
from ..core.layer_state import LayerState
from ..core.released import METADATA

__all__: list[str] = []


class Command(IntEnum):
    FETCH = 0
    STORE = 1
    END = 2


class Commands:
    """By which rank 0, which draws, tells the others what to take part in."""

    def __init__(self, states: Sequence[LayerState]) -> None:
        self._states = states
        self._communicator = states[0].communicator
        self._device = states[0].device

    def tell(
        self, command: Command, number: int = 0, full: Mapping[Chunk, Tensor] | None = None
    ) -> None:
        """Rank 0: all ranks take part in the command for layer `number`. `full`: what is fetched
        into, or stored.
        """
        self._communicator.exchange(bytes([command]) + number.to_bytes(4, "little"), self._device)
        self._do(command, number, full)

    def listen(self) -> None:
        """The other ranks: do as they are told until the end."""
        while True:
            told = self._communicator.exchange(bytes(5), self._device)[0]
            if told[0] == Command.END:
                return
            self._do(Command(told[0]), int.from_bytes(told[1:], "little"), None)

    @torch.no_grad()
    def _do(self, command: Command, number: int, full: Mapping[Chunk, Tensor] | None) -> None:
        for chunk in self._states[number].chunks if command != Command.END else ():
            if command == Command.FETCH:
                chunk.adopt_values()
                own = chunk.shard.data.to(chunk.device)
                whole = (
                    full[chunk] if full is not None else own.new_empty(chunk.layout.padded_numel)
                )
                chunk.whole.communicator.all_gather(whole, own, chunk.layout.bounds).wait()
            else:
                chunk.receive(split(full[chunk], chunk.layout) if full is not None else None)


class Hand(TorchFunctionMode):
    """Rank 0's memory: inside, what uses a parameter finds it whole, and the layers of those before
    are stored.

    Parameters without values are NaN until something fills them. Those with values are lent as
    copies, so they stay.
    """

    def __init__(
        self,
        states: Sequence[LayerState],
        copies: Mapping[nn.Module, nn.Module],
        told: Commands,
    ) -> None:
        super().__init__()
        self._states, self._tells = states, told
        self._held: dict[int, dict[Chunk, Tensor]] = {}  # by the layer's number: its full chunks
        self._stored: set[int] = set()
        self._used: set[int] = set()  # ids of parameters
        # by the layer's number: the parameters that have no values yet
        self._bare: dict[int, list[str]] = {}
        self._lent = [
            [
                nn.Parameter(each.stand_in, each.sites.parameter.requires_grad)
                for each in state.parameters
            ]
            for state in states
        ]
        self._layer_of = {
            id(parameter): number for number, lent in enumerate(self._lent) for parameter in lent
        }
        for state, lent in zip(states, self._lent, strict=True):
            for sharded, parameter in zip(state.parameters, lent, strict=True):
                for module, attribute in sharded.sites.places:
                    copies[module]._parameters[attribute] = parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in METADATA:
            used = [each for each in _tensors((args, kwargs or {})) if id(each) in self._layer_of]
            self._used.update(id(each) for each in used)
            needed = {self._layer_of[id(each)] for each in used}
            if not needed <= self._held.keys():
                self._take(needed)
        return func(*args, **(kwargs or {}))

    def _take(self, needed: set[int]) -> None:
        for number in self._held.keys() - needed:
            self._store(number)
        for number in sorted(needed - self._held.keys()):
            state = self._states[number]
            full = {
                c: torch.zeros(c.layout.padded_numel, dtype=c.shard.dtype, device=c.device)
                for c in state.chunks
            }
            if number in self._stored or any(
                each.index not in each.chunk.unloaded for each in state.parameters
            ):
                self._tells.tell(Command.FETCH, number, full)
            for each, parameter in zip(state.parameters, self._lent[number], strict=True):
                slot = view(full[each.chunk], each.chunk.layout, each.index)
                value = each.sites.face.value(each.sites, slot)
                if (
                    number not in self._stored
                    and each.index in each.chunk.unloaded
                    and value.is_floating_point()
                ):
                    value.fill_(torch.nan)
                parameter.data = value if each.index in each.chunk.unloaded else value.clone()
            self._held[number] = full

    def _store(self, number: int) -> None:
        state, full = self._states[number], self._held.pop(number)
        self._bare[number] = []
        for each, parameter in zip(state.parameters, self._lent[number], strict=True):
            slot = view(full[each.chunk], each.chunk.layout, each.index)
            if each.index in each.chunk.unloaded:
                if parameter.shape != each.stand_in.shape:
                    raise ValueError(
                        f"{each.sites.name} of layer {state.label} was given the shape "
                        f"{tuple(parameter.shape)}"
                    )
                # it may have been given other data
                each.sites.face.put(each.sites, parameter.data, slot)
            value = each.sites.face.value(each.sites, slot)
            if bool(value.isnan().any()) or (
                not value.is_floating_point() and id(parameter) not in self._used
            ):
                self._bare[number].append(f"{each.sites.name!r} of layer {state.label}")
            parameter.data = each.stand_in
        self._tells.tell(Command.STORE, number, full)
        self._stored.add(number)

    def empty(self) -> None:
        for number in list(self._held):
            self._store(number)

    def bare(self) -> list[str]:
        """The parameters that nothing has given values."""
        never = {
            number: [
                f"{e.sites.name!r} of layer {state.label}"
                for e in state.parameters
                if e.index in e.chunk.unloaded
            ]
            for number, state in enumerate(self._states)
            if number not in self._stored
        }
        return [
            name for number in range(len(self._states)) for name in (self._bare | never)[number]
        ]


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _tensors(inner)
