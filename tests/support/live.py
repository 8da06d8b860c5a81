"""Counting the bytes of live tensors, to the byte, on one rank of a world that is not there."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zero3.comm.mesh import MeshCommunicator
from zero3.comm.streams import Lanes, lanes_for


class LiveBytes(TorchDispatchMode):
    """Inside, sees every tensor that is made; knows at any time how many bytes of their storages are left."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._peak = 0
        self.left_out: Collection[int] = ()  # addresses of memory that is not counted
        self.at_every_operation: Callable[[], None] = lambda: None

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in self.left_out:
                    self._storages[storage._cdata] = weakref.ref(storage)  # lives as long as the memory, whoever holds it
        self._peak = max(self._peak, self.now)
        self.at_every_operation()
        return result

    @property
    def now(self) -> int:
        alive = ((address, ref()) for address, ref in self._storages.items())
        sizes = {address: storage.nbytes() for address, storage in alive if storage is not None}
        self._storages = {address: self._storages[address] for address in sizes}
        return sum(sizes.values())

    def settled(self, limit: int, patience: float = 10.0) -> int:
        """`now`, once it is within `limit`: a backend's thread may let go of what it has sent a moment after the wait for it."""
        until = time.monotonic() + patience
        while self.now > limit and time.monotonic() < until:
            time.sleep(0.001)
        return self.now

    def peak_of(self, body: Callable[[], object]) -> int:
        """The most that was alive after any operation of `body`."""
        self._peak = self.now
        body()
        return self._peak


class _Late:
    """Holds what it works on until it is waited for, as a transfer does."""

    def __init__(self, arrive: Callable[[], object]) -> None:
        self._arrive: Callable[[], object] | None = arrive

    def wait(self) -> None:
        if self._arrive is not None:
            self._arrive()
            self._arrive = None


class LonelyCommunicator:
    """A rank of `world_size` without the others: every rank is thought to do as this one does. Holds no memory of its own."""

    takes_pieces, tags_messages = False, True

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self.world_size, self.rank = world_size, rank

    def all_gather(self, full: Tensor, shard: Tensor, bounds: Any = None) -> _Late:
        others = [place for place in full.view(self.world_size, -1) if place.data_ptr() != shard.data_ptr()]
        return _Late(lambda: [place.copy_(shard) for place in others])

    def reduce_scatter(self, shard: Tensor, full: Tensor, bounds: Any = None) -> _Late:
        return _Late(lambda: shard.copy_(full.view(self.world_size, -1)[self.rank]))

    def all_to_all(self, received: Tensor, sent: Tensor, bounds: Any = None) -> _Late:
        return _Late(lambda: received.view(self.world_size, -1).copy_(sent.view(self.world_size, -1)[self.rank]))

    def all_reduce(self, tensor: Tensor, *, maximum: bool = False) -> None:
        return None

    def all_reduce_later(self, tensor: Tensor) -> _Late:
        return _Late(lambda: tensor.mul_(self.world_size))

    def scatter(self, shard: Tensor, slices: list[Tensor] | None, bounds: Any = None) -> _Late:
        return _Late(lambda: shard.copy_(slices[self.rank]) if slices is not None else shard.zero_())

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        return None

    def exchange(self, payload: bytes, device: torch.device) -> list[bytes]:
        return [payload] * self.world_size

    def duplicate(self) -> LonelyCommunicator:
        return self

    def lanes(self, device: torch.device) -> Lanes:
        return lanes_for(device)

    def same_ranks(self, other: object) -> bool:
        return isinstance(other, LonelyCommunicator)


def lonely(shards: int, replicas: int = 1) -> Any:
    """A rank without the others, of a mesh if there are replicas."""
    return LonelyCommunicator(shards) if replicas == 1 else MeshCommunicator(LonelyCommunicator(shards), LonelyCommunicator(replicas))
