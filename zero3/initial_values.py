"""First values for a model without any, from rank 0: layers, each in memory only while something
uses its parameters, and what is in no layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .checkpoint.meta_buffers import put
from .comm.communicator import is_first
from .core.chunk import Chunk
from .core.chunk_gradient import each_in
from .core.flat import split, view
from .core.layer_state import LayerState
from .core.parameters import ShardedParameter
from .core.released import METADATA
from .modules import plain_modules

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
                whole = own.new_empty(chunk.layout.padded_numel) if full is None else full[chunk]
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
            given = each_in([*args, *(kwargs or {}).values()])
            used = [each for each in given if id(each) in self._layer_of]
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
            stored = number in self._stored
            if stored or not all(map(_is_empty, state.parameters)):
                self._tells.tell(Command.FETCH, number, full)
            for each, parameter in zip(state.parameters, self._lent[number], strict=True):
                slot = view(full[each.chunk], each.chunk.layout, each.index)
                value = each.sites.face.value(each.sites, slot)
                if not stored and _is_empty(each) and value.is_floating_point():
                    value.fill_(torch.nan)
                parameter.data = value if _is_empty(each) else value.clone()
            self._held[number] = full

    def _store(self, number: int) -> None:
        state, full = self._states[number], self._held.pop(number)
        self._bare[number] = []
        for each, parameter in zip(state.parameters, self._lent[number], strict=True):
            slot = view(full[each.chunk], each.chunk.layout, each.index)
            if _is_empty(each):
                if parameter.shape != each.stand_in.shape:
                    raise ValueError(
                        f"{each.sites.name} of layer {state.label} was given the shape "
                        f"{tuple(parameter.shape)}"
                    )
                # it may have been given other data
                each.sites.face.put(each.sites, parameter.data, slot)
            value = each.sites.face.value(each.sites, slot)
            unused = not value.is_floating_point() and id(parameter) not in self._used
            if unused or bool(value.isnan().any()):
                self._bare[number].append(f"{each.sites.name!r} of layer {state.label}")
            parameter.data = each.stand_in
        self._tells.tell(Command.STORE, number, full)
        self._stored.add(number)

    def empty(self) -> None:
        for number in list(self._held):
            self._store(number)

    def bare(self) -> list[str]:
        """The parameters that nothing has given values."""
        found: list[str] = []
        for number, state in enumerate(self._states):
            never = (e for e in state.parameters if _is_empty(e) and number not in self._stored)
            found += [f"{e.sites.name!r} of layer {state.label}" for e in never]
            found += self._bare.get(number, ())
        return found


class Others:
    """Tensors on the meta device that are in no chunk: buffers, mostly. Rank 0 draws them too, and
    sends them to all.
    """

    def __init__(self, model: nn.Module, states: Sequence[LayerState]) -> None:
        self._model, self._first = model, states[0]
        self._old = {id(tensor): tensor for _, _, tensor in self._places() if tensor.is_meta}
        # one of its places, in the twin; what stands there; its version
        self._lent: dict[int, tuple[nn.Module, str, Tensor, int]] = {}
        self._drawn: dict[int, Tensor] = {}
        self.bare: list[str] = []  # parameters that nothing has given values

    def _places(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for module in plain_modules(self._model):
            for name, tensor in [*module._buffers.items(), *module._parameters.items()]:
                if tensor is not None:
                    yield module, name, tensor

    def lend(self, copies: Mapping[nn.Module, nn.Module]) -> None:
        for module, name, old in self._places():
            if module not in copies or not (old.is_meta or name in module._buffers):
                continue
            copy = copies[module]
            if not old.is_meta:  # its values may be read, and stay
                copy._buffers[name] = old.clone()
                continue
            is_parameter = isinstance(old, nn.Parameter)
            if id(old) not in self._lent:
                fill = torch.nan if old.is_floating_point() else 0
                device = self._first.device
                new = torch.full_like(old, fill, device=device, requires_grad=False)
                new = nn.Parameter(new, old.requires_grad) if is_parameter else new
                self._lent[id(old)] = copy, name, new, new._version
            held: dict[str, Any] = copy._parameters if is_parameter else copy._buffers
            held[name] = self._lent[id(old)][2]

    def take_back(self) -> None:
        for key, (copy, name, lent, version) in self._lent.items():
            is_parameter = isinstance(lent, nn.Parameter)
            now = copy._parameters[name] if is_parameter else copy._buffers.get(name)
            if now is None or now.is_meta:
                continue
            full = now.is_floating_point() and not now.isnan().any()
            if full or now is not lent or now._version != version:
                self._drawn[key] = now.detach()
            elif is_parameter:
                self.bare.append(repr(name))

    @torch.no_grad()
    def spread(self) -> None:
        """Rank 0's values to all ranks."""
        communicator, device = self._first.communicator, self._first.device
        flags = bytes(key in self._drawn for key in self._old)
        drawn = communicator.exchange(flags, device)[0] if flags else b""
        for (key, old), found in zip(self._old.items(), drawn, strict=True):
            if found:
                value = torch.empty_like(old, device=device, requires_grad=False)
                if is_first(communicator):
                    value.copy_(self._drawn[key])
                communicator.broadcast(value)
                put(self._model, old, value)


def _is_empty(sharded: ShardedParameter) -> bool:
    """Whether it has no values yet."""
    return sharded.index in sharded.chunk.unloaded
