"""Where chunks, gradients and state rest in a plan for `offload`: nowhere, but what they would take
is written down.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ..core.gradient_types import reduce_deferred
from ..offload.one_by_one import each_alone, step_of
from ..optim.several import held_by
from ..scratch.regions import pinned_nbytes
from .ledger import ELSEWHERE, Ledger

__all__: list[str] = []


class OnPaper:
    """A place without memory. `resting`: around what is made. `far`: the device is a GPU."""

    rests = True
    norm_order = None

    def __init__(
        self, resting: Callable[[], AbstractContextManager[object]], *, in_files: bool, far: bool
    ) -> None:
        self._resting, self._in_files, self.far, self.at_once = resting, in_files, far, in_files
        self.name = "files" if in_files else "host memory"

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        with self._resting():
            memory = torch.empty(self.taken(nbytes), dtype=torch.uint8, device="meta")
        return memory[:nbytes].view(dtype)

    to_copy_into = allocate

    def taken(self, nbytes: int) -> int:
        return pinned_nbytes(nbytes) if self.far and not self._in_files else nbytes

    def another(self, values: Tensor) -> Tensor:
        return self.allocate(values.numel(), values.dtype)

    def lend(self, values: Tensor, into: Tensor | None) -> Tensor:
        """What comes from a file passes through pinned memory."""
        if into is None or not into.numel():
            return into if into is not None else values
        passed = self.another(values) if self._in_files else values.detach()
        return into.copy_(passed)

    def go_on(self, *_: object, **__: object) -> None:
        """Nothing has to come, to be written or to be waited for."""

    belong_to = settle = check_process = rest_gradients = is_used_at_once = note_short = go_on
    reserve = bring = rest = read_ahead = write = soon = go_on

    def keep(self, gradient: Tensor) -> Tensor:
        return self.another(gradient).copy_(gradient) if self._in_files else gradient

    def is_away(self, tensor: Tensor) -> bool:
        return False


def step_by_turns(optimizer: torch.optim.Optimizer, ledger: Ledger, *, far: bool) -> None:
    """As an optimizer's step after `offload_optimizer`, chunk by chunk: on the host if that is
    `far`, else where layers compute.

    State lies in files when it is made. (In the step that makes it, it may be counted. That one is
    in no plan.)
    """
    reduce_deferred(parameter.grad for parameter in held_by(optimizer))
    with ledger.because(ELSEWHERE if far else "optimizer"):
        each_alone(optimizer, step_of(type(optimizer)))
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim:
                ledger.note(value, ELSEWHERE)
