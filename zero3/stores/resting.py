"""What a store can do that is not where layers compute: a place for a chunk and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..core.chunk import Chunk, Store

__all__: list[str] = []


class Resting(Store, Protocol):
    """The memory of a gradient that is gone is that of the next one."""

    # whether gradients of an accelerator land one by one, so that few of them pass through memory
    # at any time
    at_once: bool

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """1-D memory for values."""
        ...

    def reserve(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        """Makes sure of the memory of gradients."""
        ...

    def belong_to(self, chunk: Chunk) -> None:
        """`chunk`: the one whose place it is."""
        ...

    def to_copy_into(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for a gradient that a device can write while the host goes on."""
        ...

    # -- for the optimizer's turns (`offload_optimizer`)

    def read_ahead(self, tensor: Tensor) -> None:
        """Values, or a gradient, are needed soon."""
        ...

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        """Brings values, or a gradient, into memory, and returns when they are there: for a thread
        beside compute.
        """
        ...

    def is_away(self, tensor: Tensor) -> bool:
        """Whether values, or a gradient, had to leave memory, because it is short."""
        ...

    def write(self, values: Tensor) -> None:
        """Values that have changed go where they rest. Returns when they are there: for a thread
        beside compute.
        """
        ...

    def rest_gradients(self) -> None:
        """They are not needed for now."""
        ...

    def is_used_at_once(self, by: Callable[[], bool]) -> None:
        """`by`: whether a gradient is used up as soon as it has landed, so that it need not rest
        anywhere.
        """
        ...

    def note_short(self, is_short: bool) -> None:
        """Whether memory was short in the last step: gradients had been dropped. Then they are
        written early.
        """
        ...


class Keeping(Resting, Protocol):
    """One where gradients are put away."""

    norm_order: float | None  # of the norms to take of gradients when they land

    def keep(self, gradient: Tensor) -> Tensor:
        """A gradient where it rests. It is called while other ranks wait, so it does not raise: if
        there is no room it stays in memory.
        """
        ...


def resting_place(chunk: Chunk | None) -> Resting | None:
    """Where a chunk rests. None: where its layer computes."""
    store = None if chunk is None else chunk.store
    return store if store is not None and store.rests else None  # type: ignore[return-value]
