"""The only file that imports torch's DDP hooks and torch's `Join`, its context for uneven
inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, JoinHook
from torch.distributed.algorithms.join import Joinable as Joinable

__all__: list[str] = []

# (process group, bucket) -> the future of the bucket's mean, in the bucket's own memory
mean_of_ranks = allreduce_hook


class GradBucket(Protocol):
    """A group of gradients that DDP reduces together."""

    def index(self) -> int: ...

    def is_last(self) -> bool: ...

    def buffer(self) -> Tensor:
        """All gradients of the bucket, as one 1-D tensor."""
        ...

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one for each parameter."""
        ...

    def parameters(self) -> list[Tensor]: ...


class Shadow(JoinHook):
    """Runs `iteration` on a rank without data, once for every iteration of the other ranks."""

    def __init__(
        self, iteration: Callable[[], None], end: Callable[[], None] = lambda: None
    ) -> None:
        self._iteration = iteration
        self._end = end  # called on all ranks when the context ends

    def main_hook(self) -> None:
        self._iteration()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._end()


def still_here(joinable: Joinable) -> None:
    """Tells `Join`, before an iteration's collectives, that this rank still has data. Outside the
    context it does nothing.
    """
    if (work := Join.notify_join_context(joinable)) is not None:
        work.wait()
