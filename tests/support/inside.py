"""One door to what layers hold inside, for tests of what no public name tells: chunks, full buffers, kept gradients.

What a public name tells has no function here: `parameters()` lists the chunks' values, `zero3.report` tells bytes and layers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from zero3 import access
from zero3.comm.errors import NamingFailures
from zero3.conductors.conducted import ConductedCommunicator
from zero3.core.account import Account
from zero3.core.chunk import Chunk
from zero3.core.collectives import Straight
from zero3.core.layer_state import LayerState
from zero3.optim import check_optimizer


def states_of(model: nn.Module) -> list[LayerState]:
    """A state for each layer; the root's own comes last."""
    return access.states_of(model)


def chunks_of(model: nn.Module) -> list[Chunk]:
    return [chunk for state in states_of(model) for chunk in state.chunks]


def accounts_of(model: nn.Module) -> list[Account]:
    """The accounts of trainable chunks' gradients."""
    return [account for state in states_of(model) for account in state.gradients.accounts.values()]


def presences(model: nn.Module) -> list[str]:
    """Of each layer: whether it is released, fetching, fetched or kept."""
    return [state.presence.value for state in states_of(model)]


def held_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of the full buffers that have memory now, by the layers' names in a model that `shard` has sharded."""
    found = {_name(state): sum(chunk.full.tensor.untyped_storage().nbytes() for chunk in state.chunks) for state in states_of(model)}
    return {name: nbytes for name, nbytes in found.items() if nbytes}


def whole_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of the full buffers while their layers are fetched, by the layers' names."""
    return {_name(state): state.chunks.full_nbytes() for state in states_of(model)}


def _name(state: LayerState) -> str:
    return state.label.split("'")[1] if "'" in state.label else "root"


def owned_by(model: nn.Module) -> dict[int, check_optimizer.Owned]:
    """What each parameter that an optimizer may hold is, by its id: of which layer, and which pieces of which parameters."""
    return check_optimizer.owned_by(states_of(model))


@contextmanager
def changed_gradients(change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """A fault to be found: within it each gradient that autograd brings is what `change(name, gradient)` makes of it."""
    real = Account.add

    def add(self: Account, index: int, gradient: Tensor) -> None:
        real(self, index, change(self.chunk.layout.slots[index].name, gradient))

    with mock.patch.object(Account, "add", add):
        yield


@contextmanager
def most_of_gradients(model: nn.Module) -> Iterator[list[int]]:
    """Gives bytes of all full gradients, kept and on their way, whenever one begins its way. Until it is copied, it is there twice."""
    on_their_way: list[weakref.ref[torch.UntypedStorage]] = []
    found: list[int] = []
    real = Account.take_room

    def held() -> int:
        kept = [tensor.untyped_storage() for account in accounts_of(model) for tensor in account.held]
        gone = [storage for each in on_their_way if (storage := each()) is not None]
        return sum({storage._cdata: storage.nbytes() for storage in (*kept, *gone)}.values())

    def take_room(self: Account, group: Any) -> Any:
        before, gradient = held(), real(self, group)
        assert gradient.full is not None, "it is copied"
        on_their_way.append(weakref.ref(gradient.full.untyped_storage()))
        found.extend((before + gradient.full.untyped_storage().nbytes(), held()))
        return gradient

    with mock.patch.object(Account, "take_room", take_room):
        yield found


def reduce_now(state: LayerState, chunk: Chunk) -> None:
    """Reduces the gradients that have come to a chunk, as a backward does."""
    account, group = state.gradients.accounts[chunk], state.communicator
    account.flow.start(account.take_room(group), state.chunks.lanes, NamingFailures(group, "reducing", state.subject)).wait()


def is_straight(model: nn.Module) -> bool:
    """Whether nobody stands between the model and its collectives."""
    return all(
        isinstance(state.conductor, Straight) and not isinstance(state.communicator, ConductedCommunicator) for state in states_of(model)
    )
