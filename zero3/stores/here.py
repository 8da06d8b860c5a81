"""Values that rest where the layer computes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..core.chunk import Chunk

__all__: list[str] = []


class Here:
    """In the memory in which the layer computes."""

    name = "memory"
    far = rests = False

    def taken(self, nbytes: int) -> int:
        return nbytes

    def lend(self, values: Tensor, into: Tensor | None) -> Tensor:
        return values

    def another(self, values: Tensor) -> Tensor:
        return values.clone()

    def soon(self, chunk: Chunk) -> None:
        return None

    def rest(self, values: Tensor) -> None:
        return None

    def settle(self, chunk: Chunk, recent: list[Any] | None, *, before_backward: bool) -> None:
        return None

    def go_on(self) -> None:
        return None

    check_process = go_on
