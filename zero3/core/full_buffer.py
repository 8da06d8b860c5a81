"""The memory that a layer's parameters are whole in: a full buffer, whose storage comes and goes.
The one place where storages are resized.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

__all__: list[str] = []


def _marked(full: Tensor) -> Tensor:
    full.untyped_storage().zero3_shows_parameters = True  # type: ignore[attr-defined]
    return full


def shows_parameters(tensor: Tensor) -> bool:
    """Whether a strided tensor's memory is a full buffer."""
    return getattr(tensor.untyped_storage(), "zero3_shows_parameters", False)


class FullBuffer:
    """A flat tensor whose storage is freed and allocated again, while the tensor and its views stay
    the same objects.

    Graphs save views of the weights. These views see the storage, so a layer keeps one buffer for
    life: the buffer is freed after forward and filled again in backward, and then the graph's views
    show the same values as in forward.
    """

    is_chunk = False  # whether it is the chunk's own memory
    shows_released = False  # whether released parameters stay readable in it

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, tracks_versions: bool
    ) -> None:
        """`tracks_versions`: whether parameters' versions tell graphs that it was released."""
        self._numel, self.tracks_versions = numel, tracks_versions
        self.tensor = torch.empty(0, dtype=dtype, device=device)  # 1-D [W*S] from its first use on
        self._storage: torch.UntypedStorage = self.tensor.untyped_storage()
        self._nbytes = 0
        self.views: Sequence[Tensor] = ()  # the parameters' data, one for each slot, likewise
        # whether it holds what the chunks of all ranks held at its last gather
        self.filled = False
        # whether views of it are in use outside: then release does not free it
        self.left = False

    def allocate(self) -> None:
        if self.tensor.numel() != self._numel:
            with torch.inference_mode(False):  # training may use the same buffer later
                self.tensor = _marked(self.tensor.new_empty(self._numel))
            self._storage, self._nbytes = self.tensor.untyped_storage(), self.tensor.nbytes
        elif self._storage.nbytes() != self._nbytes:
            self._storage.resize_(self._nbytes)

    def show(self, views: Sequence[Tensor]) -> None:
        self.views = views

    def arrive(self) -> None:
        """What was gathered is there."""
        self.filled = True

    def forget(self) -> None:
        """What it holds is not to be used again."""
        self.filled = False

    def free(self) -> None:
        self.filled = False
        self._storage.resize_(0)

    def leave(self) -> None:
        """Views of it may stay in use. Release leaves it to them, and the next fetch takes a new
        one.
        """
        self.left = True

    def leave_versions(self) -> None:
        """Parameters' versions stay."""
        self.tracks_versions = False

    def in_use(self) -> Callable[[], bool]:
        """Returns what tells, once the chunk has another one, whether views of it are in use."""
        kept = StorageWeakRef(self._storage)  # type: ignore[no-untyped-call]
        return lambda: not kept.expired()  # type: ignore[no-untyped-call]

    def let_escape(self, tensor: Tensor) -> None:
        """If `tensor`, an output of the layer, is a view of it, the memory is left to that."""
        # sparse tensors have no storage
        if tensor.layout == torch.strided and tensor.untyped_storage() is self._storage:
            self.left = True


class MovableMemory:
    """All that a tensor's storage holds. It can be given back: the tensor, and others over it, stay
    the same objects, and nobody may read them until it is taken again.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()
        self.bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(self._storage)

    @property
    def address(self) -> int:
        return self._storage.data_ptr()

    @property
    def may_go(self) -> bool:
        """Mapped memory, for one, may not."""
        return self._storage.resizable() and self.bytes.numel() > 0

    def give_back(self) -> None:
        self._storage.resize_(0)

    def take(self) -> None:
        self._storage.resize_(self.bytes.numel())


class Lifetime(IntEnum):
    """How long a full buffer stays filled. Each value holds longer than those before it."""

    CALL = 0  # until the layer's call is over
    PASS = 1  # from a forward to its backward
    STEPS = 2  # from step to step: it is gathered again only after a change


class OwnMemory:
    """The full buffer of a chunk that is not cut: the chunk's own memory. Nothing is allocated,
    transferred or freed, and views of it stay valid.
    """

    is_chunk = True
    left = False

    def __init__(self, shard: nn.Parameter, *, shows_released: bool, tracks_versions: bool) -> None:
        self.shows_released, self.tracks_versions = shows_released, tracks_versions
        self.filled = False  # nothing is gathered
        self.tensor = _marked(shard.data)  # 1-D [S], the same memory
        self.views: Sequence[Tensor] = ()

    def show(self, views: Sequence[Tensor]) -> None:
        self.views = views

    def allocate(self) -> None:
        return None

    arrive = forget = free = leave = leave_versions = allocate

    def in_use(self) -> Callable[[], bool]:
        return lambda: True

    def let_escape(self, tensor: Tensor) -> None:
        return None
