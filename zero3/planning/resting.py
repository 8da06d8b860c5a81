"""Where chunks, gradients and state rest in a plan for `offload`: nowhere, but what they would take
is written down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ..core.chunk import Chunk
from ..core.gradient_types import reduce_deferred
from ..offload.one_by_one import narrowed, step_of
from ..scratch.regions import pinned_nbytes
from .ledger import ELSEWHERE, Ledger

__all__: list[str] = []


class OnPaper:
    """A place without memory. `resting`: around what is made in it. `far`: the planned device
    is a GPU.
    """

    rests = True
    norm_order = None

    def __init__(
        self, resting: Callable[[], AbstractContextManager[object]], *, in_files: bool, far: bool
    ) -> None:
        self._resting, self._in_files, self.far, self.at_once = resting, in_files, far, in_files
        self.name = "files" if in_files else "host memory"

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        with self._resting():
            if self.far and not self._in_files:
                return torch.empty(
                    self.taken(numel * dtype.itemsize), dtype=torch.uint8, device="meta"
                )[: numel * dtype.itemsize].view(dtype)
            return torch.empty(numel, dtype=dtype, device="meta")

    to_copy_into = allocate

    def taken(self, nbytes: int) -> int:
        return pinned_nbytes(nbytes) if self.far and not self._in_files else nbytes

    def lend(self, values: Tensor, into: Tensor | None) -> Tensor:
        """What comes from a file passes through pinned memory."""
        if into is None or not into.numel():
            return into if into is not None else values
        passed = self.allocate(values.numel(), values.dtype) if self._in_files else values.detach()
        return into.copy_(passed)

    def belong_to(self, chunk: Chunk) -> None:
        return None

    def settle(self, chunk: Chunk, recent: list[Any] | None, *, before_backward: bool) -> None:
        return None

    def go_on(self) -> None:
        return None

    check_process = rest_gradients = go_on

    def is_used_at_once(self, by: Callable[[], bool]) -> None:
        return None

    def note_short(self, is_short: bool) -> None:
        return None

    def keep(self, gradient: Tensor) -> Tensor:
        return (
            self.allocate(gradient.numel(), gradient.dtype).copy_(gradient)
            if self._in_files
            else gradient
        )

    def reserve(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        return None

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        return None

    def rest(self, values: Tensor) -> None:
        return None

    read_ahead = write = rest

    def soon(self, chunk: Chunk) -> None:
        return None

    def is_away(self, tensor: Tensor) -> bool:
        return False


def step_by_turns(optimizer: torch.optim.Optimizer, ledger: Ledger, *, far: bool) -> None:
    """As an optimizer's step after `offload_optimizer`, chunk by chunk: on the host if that is
    `far`, else where layers compute.

    State lies in files when it is made. (In the step that makes it, it may be counted. That one is
    in no plan.)
    """
    reduce_deferred(
        parameter.grad for group in optimizer.param_groups for parameter in group["params"]
    )
    own = step_of(type(optimizer))
    with ledger.because(ELSEWHERE if far else "optimizer"), narrowed(optimizer) as narrow:
        for group in list(optimizer.param_groups):
            for parameter in list(group["params"]):
                narrow([(group, [parameter])])
                own(optimizer)
    for tensor in _state_of(optimizer):
        ledger.note(tensor, ELSEWHERE)


def _state_of(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    kept = (value for state in optimizer.state.values() for value in state.values())
    return (value for value in kept if isinstance(value, Tensor) and value.ndim)
