"""parked(): what a model and its optimizers have in a device's memory rests elsewhere for a while,
and an engine has the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import Tensor, nn

from ..checkpoint.contents import check_released
from ..checkpoint.file_operations import write_at
from ..checkpoint.lazy import STAGE_BYTES, bytes_of
from ..checkpoint.numbered import saves_of
from ..checkpoint.safetensors_files import fill
from ..comm.agreement import agreeing
from ..comm.factory import give_memory_back
from ..comm.mesh import shards_of
from ..comm.streams import give_cache_back
from ..conductors.conducted import unconducted
from ..core.autograd import as_plain_tensors, tensors_in
from ..core.chunk_gradient import DeferredGradient
from ..core.collectives import Collective
from ..core.flat import not_a_number
from ..core.full_buffer import MovableMemory
from ..core.layer_state import LayerState, accounts_of, chunks_of, ignored_of, parts_of
from ..door import Door, used_between
from ..optim.several import held_by, members_of
from ..optim.state_memory import land_steps
from ..policy import place_of
from ..scratch.nameless_file import room_on_disk

__all__: list[str] = []


def parked(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    to: str | os.PathLike[str] = "cpu",
) -> AbstractContextManager[None]:
    """Context in which a sharded model leaves its device: chunks, gradients (those that `no_sync`
    keeps, too), the optimizer's state and full buffers rest in host memory, or in a file.

    Every rank enters and leaves it. At its end all are back, bit for bit, in the same objects, also
    after an exception. It makes one agreement at its beginning and one at its end, and no other
    transfer. Inside, shapes and dtypes can be read, and values can't: nothing that the caller does
    to them there stays, but for gradients that are zeroed, which stay so. Buffers of modules, and
    what is not the model's or its optimizers', stay on the device. Views that the caller has made
    of chunks have no memory inside, and must not be used there.

    Args:
        model: Any model that contains zero3 layers.
        optimizer: The optimizer of its chunks, or several. None: only what the model has is moved.
        to: "cpu", or a directory, which is made if it is not there, and may be another one on each
            rank. Its file has no name, so it vanishes with the process. What is there already, as
            on a CPU, or with `offload`, stays where it is.

    Raises:
        RuntimeError: It is called inside a forward, a backward, `full_params`, `resident`,
            `step_guard` or another one. Inside: a forward, a backward, a step of any optimizer of
            the model, a save, a load, and all else that uses values. At the end, on every rank: one
            has too little memory. The error names it, and the bytes; the model stays parked, and
            all ranks may try again by the context's `__exit__(None, None, None)`.
        ValueError: Nothing in `model` is sharded, an optimizer holds other parameters, or `to` is
            a text that can be no directory. Every rank raises it.
        TypeError: `to` is no path, or `optimizer` no optimizer. Every rank raises it.
        OSError: There is no room on the disk, or the directory can't be written. Every rank raises
            it, and nothing has moved.

    Example::

        with zero3.parked(model, optimizer):
            texts = engine.generate(prompts)
    """
    return _Parking(model, optimizer, to)


class _Parking(AbstractContextManager[None]):
    """What `parked` returns."""

    def __init__(self, model: nn.Module, optimizer: Any, to: object) -> None:
        self._given = model, optimizer, to

    def __enter__(self) -> None:
        model, optimizer, to = self._given
        states = used_between(model, "parked")
        first = self._first = states[0]
        saves_of(first).finish()
        with agreeing(first, "parked") as lines:
            lines.append("in host memory" if to == "cpu" else "in a file")
            members = [] if optimizer is None else members_of(optimizer)
            _check(states, members)
            land_steps(states)
            for state in states:
                state.release()
            place = place_of(to, 'parked(to=) must be "cpu" or a directory')
            rest = _HostCopies() if to == "cpu" else _ParkingFile(os.path.abspath(place))
            self._away = _Away(states, members, rest)
        self._refusals = ExitStack()
        self._refusals.callback(Door(states, _refuse).open)
        for each in members:
            saves = partial(_refuse, "saves an optimizer's state")
            loads = partial(_refuse, "loads an optimizer's state")
            self._refusals.callback(each.register_state_dict_pre_hook(saves).remove)
            self._refusals.callback(each.register_load_state_dict_pre_hook(loads).remove)
        try:
            self._away.leave()
            give_memory_back(shards_of(unconducted(first.communicator)))
            give_cache_back(first.device)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        first = self._first
        with agreeing(first, "the end of parked", "parked"):
            self._away.come_back()
        del self._away
        self._refusals.close()


def _refuse(what: Collective | str, *_: object) -> NoReturn:
    raise RuntimeError(
        f"the model {what} inside zero3.parked: its values are not on the device. Leave it first"
    )


def _check(states: Sequence[LayerState], members: Sequence[Any]) -> None:
    check_released(states, "parked")
    if any(state.gradients.holds for state in states):
        raise RuntimeError("parked inside step_guard: put it around the guard")
    own = {*map(id, parts_of(states)), *(id(each.parameter) for each in ignored_of(states))}
    # an empty parameter stands in a group of which this rank has nothing
    if strange := [p for p in held_by(*members) if p.numel() and id(p) not in own]:
        raise ValueError(
            f"parked: the optimizer holds {len(strange)} parameters that are not this model's "
            f"chunks (the first has the shape {tuple(strange[0].shape)}): pass the model's own"
        )


class _HostCopies:
    """Where memory rests: `put` copies it, and `fetch` copies it back in the same order."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []

    def takes(self, memory: Tensor) -> bool:
        return memory.device.type != "cpu"

    def put(self, memories: Sequence[MovableMemory]) -> None:
        self._copies = [memory.bytes.cpu() for memory in memories]

    def fetch(self, memories: Sequence[MovableMemory]) -> None:
        for memory, copy in zip(memories, self._copies, strict=True):
            memory.bytes.copy_(copy)


class _ParkingFile:
    """A file without a name."""

    def __init__(self, directory: str) -> None:
        os.makedirs(directory, exist_ok=True)
        self._directory = directory

    def takes(self, memory: Tensor) -> bool:
        return True

    def put(self, memories: Sequence[MovableMemory]) -> None:
        nbytes = sum(memory.bytes.numel() for memory in memories)
        try:
            self._file = room_on_disk(self._directory, nbytes)
        except ValueError as error:
            raise OSError(str(error)) from error
        finalize(self, self._file.close)  # also if another rank refuses
        for place, piece in _pieces(memories):
            write_at(self._file, place, bytes_of(piece.cpu()))

    def fetch(self, memories: Sequence[MovableMemory]) -> None:
        for place, piece in _pieces(memories):
            here = piece if piece.device.type == "cpu" else piece.cpu()
            if fill(self._file, place, bytes_of(here)) < piece.numel():
                raise OSError(f"{self._directory!r} has lost a part of the parked values")
            piece.copy_(here)


def _pieces(memories: Iterable[MovableMemory]) -> Iterator[tuple[int, Tensor]]:
    """Pieces of a few MB, and their places one behind another."""
    place = 0
    for memory in memories:
        for piece in torch.split(memory.bytes, STAGE_BYTES):
            yield place, piece
            place += piece.numel()


class _Parked:
    """The layer of a gradient that has no values here."""

    holds = 0

    def chunk_changed(self, label: str) -> None: ...

    def reduce_deferred(self) -> NoReturn:
        _refuse("needs the values of a gradient")


class _Away:
    """What is to leave: it is copied when this is made, and gone after `leave`.

    What callers can reach becomes one number, stretched to its shape, meanwhile: to read a tensor
    without memory would end the process. A gradient becomes one that has no values.
    """

    def __init__(
        self, states: Sequence[LayerState], members: Iterable[Any], rest: _HostCopies | _ParkingFile
    ) -> None:
        parts = parts_of(states)
        kept = [(p, p.grad) for p in parts if p.grad is not None]
        reached: list[Tensor] = [*(chunk.shard for chunk in chunks_of(states)), *parts]
        reached += _tensors([list(member.state.values()) for member in members])
        reduced = [g.earlier if isinstance(g, DeferredGradient) else g for _, g in kept]
        reached += _tensors([reduced, [vars(g).get("zero3_exact") for _, g in kept]])
        inner = [t for account in accounts_of(states) for t in account.held]
        self._rest, self._undo = rest, ExitStack()
        self._is_gone = False
        with as_plain_tensors():
            found = {memory.address: memory for memory in map(MovableMemory, [*reached, *inner])}
            self._memories = {a: m for a, m in found.items() if m.may_go and rest.takes(m.bytes)}
            self._reached = [tensor for tensor in reached if self._moves(tensor)]
            self._gradients = [
                (p, g) for p, g in kept if isinstance(g, DeferredGradient) or self._moves(g)
            ]
        # of one rank, whose released parameters are views of the chunk
        self._released = [
            sharded
            for state in states
            for sharded in state.parameters
            if sharded.chunk.resident and self._moves(sharded.chunk.shard)
        ]
        rest.put(list(self._memories.values()))

    def _moves(self, tensor: Tensor) -> bool:
        return MovableMemory(tensor).address in self._memories

    def leave(self) -> None:
        self._is_gone = True
        for parameter, gradient in self._gradients:
            stand_in = DeferredGradient.like(parameter, _Parked, stands_in=True)
            parameter.grad = stand_in
            self._undo.callback(_bring, parameter, gradient, stand_in)
        for sharded in self._released:
            self._undo.callback(sharded.sites.hide, sharded.sites.data())
            sharded.sites.hide(sharded.stand_in)
        with as_plain_tensors():
            for tensor in self._reached:
                self._undo.callback(_set_data, tensor, tensor.data)
                tensor.data = not_a_number(tensor.dtype, tensor.device).expand(tensor.shape)
        for memory in self._memories.values():
            memory.give_back()

    def come_back(self) -> None:
        """Nothing has changed if it raises."""
        if not self._is_gone:
            return
        memories = list(self._memories.values())
        try:
            for memory in memories:
                memory.take()
            self._rest.fetch(memories)
        except BaseException as error:
            for memory in memories:
                memory.give_back()
            if not isinstance(error, Exception):
                raise
            nbytes = sum(memory.bytes.numel() for memory in memories)
            raise RuntimeError(
                f"{nbytes} bytes that were parked could not come back ({type(error).__name__}: "
                f"{error}). They are still parked: free memory, and leave the context again on all "
                "ranks (its __exit__(None, None, None))"
            ) from error
        self._is_gone = False
        self._undo.close()


def _tensors(holders: Iterable[Any]) -> list[Tensor]:
    """Those in nested containers, and those that subclasses of other libraries hold in them."""
    found: list[Tensor] = []
    for tensor in tensors_in(list(holders)):
        if hasattr(tensor, "__tensor_flatten__"):
            found += (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        elif tensor.layout == torch.strided:
            found.append(tensor)
    return found


def _set_data(tensor: Tensor, data: Tensor) -> None:
    with as_plain_tensors():
        tensor.data = data


def _bring(parameter: Tensor, gradient: Tensor, stand_in: DeferredGradient) -> None:
    """Unless the caller has dropped it."""
    if parameter.grad is not stand_in:
        return
    parameter.grad = gradient
    if stand_in.zeroed and isinstance(gradient, DeferredGradient):
        gradient.count_as_zeroed(True)
    elif stand_in.zeroed:
        gradient.zero_()
