"""Chunks and gradients on the host, in pinned memory. The device reads and writes copies.

fetch      the chunk is copied into its slice of the full buffer, on the fetch lane, and
           gathered from there
backup     the gradient's slice is copied to the host, on the backup lane
landing    the host waits for that copy, and makes it the chunk's gradient, or adds it to that
writing    the host waits for the copy of the fetch: at the end of a backward, or of a forward
           without gradients. Between a forward with gradients and its backward the host goes
           on, and whoever asks for a chunk's values there waits (`WatchedParameter`)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.streams import Fence, OnHost, Pending
from ..core.autograd import as_plain_tensors
from ..core.chunk import Chunk
from ..core.flow import Travelling
from ..core.gradient_buffer import GradientBuffer
from ..core.gradient_types import SEEN_WITHOUT_VALUES, each_in
from ..scratch.regions import PinnedRegions, pinned_nbytes
from .resting import Resting

__all__: list[str] = []


class WatchedParameter(nn.Parameter):
    """A parameter on the host whose values somebody else uses now. Whoever asks for them calls
    `first`: he may be about to write.

    It is made by switching a parameter's class. It is an ordinary one again when `first` has
    returned, and when the model goes on.
    """

    first: Callable[[], object]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _ASKS_NO_VALUES:
            for each in each_in([*args, *(kwargs or {}).values()]):
                if isinstance(each, WatchedParameter):
                    each.ask()
            return func(*args, **(kwargs or {}))
        with as_plain_tensors():
            return func(*args, **(kwargs or {}))

    def ask(self) -> nn.Parameter:
        self.first()
        return self.as_usual()

    def as_usual(self) -> nn.Parameter:
        vars(self).pop("first", None)
        self.__class__ = nn.Parameter  # type: ignore[assignment]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.ask().__deepcopy__(memo)  # type: ignore[no-untyped-call]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.ask().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


_ASKS_NO_VALUES = SEEN_WITHOUT_VALUES | {
    getattr(Tensor.grad, name) for name in ("__get__", "__set__", "__delete__")
}


def watch_values(chunk: Chunk, first: Callable[[], object]) -> list[nn.Parameter]:
    """From now on whoever asks for the values of the chunk's parameters calls `first`. Returns
    these parameters.
    """
    parameters = {
        id(each): each for each in (chunk.shard, *(part.parameter for part in chunk.parts))
    }
    for parameter in parameters.values():
        parameter.first = first  # type: ignore[attr-defined]
        parameter.__class__ = WatchedParameter
    return list(parameters.values())


class Pinned:
    """Pinned memory, for an accelerator, which copies while the host goes on."""

    name = "host memory"
    far = rests = True
    at_once = False  # gradients land at the end of a backward

    def __init__(self) -> None:
        regions = PinnedRegions()
        self.allocate = self.to_copy_into = regions.empty
        self._read: Fence | None = None  # the end of the last copy to the device
        self._watched: list[nn.Parameter] = []

    def taken(self, nbytes: int) -> int:
        return pinned_nbytes(nbytes)

    def belong_to(self, chunk: Chunk) -> None:
        return None

    def reserve(self, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        _ = [self.allocate(numel, dtype) for dtype in dtypes]

    def lend(self, values: Tensor, into: Tensor | None) -> Tensor:
        if into is None:
            return values
        if into.numel():
            into.copy_(values, non_blocking=True)
            self._read = Fence(into.device)
        return into

    def settle(self, chunk: Chunk, recent: list[Any] | None, *, before_backward: bool) -> None:
        if self._read is None:
            return
        if before_backward:
            self._watched = watch_values(chunk, self._read.synchronize)
        else:
            read, self._read = self._read, None
            read.synchronize()

    def go_on(self) -> None:
        """A forward or a backward reads chunks itself, and its end settles them."""
        for parameter in self._watched:
            if isinstance(parameter, WatchedParameter):
                parameter.as_usual()
        self._watched = []

    def soon(self, chunk: Chunk) -> None:
        return None

    def rest(self, values: Tensor) -> None:
        return None

    # -- it is all in memory, always

    def bring(self, tensor: Tensor, *, to_write: bool) -> None:
        return None

    def is_away(self, tensor: Tensor) -> bool:
        return False

    def write(self, values: Tensor) -> None:
        return None

    read_ahead = write

    def rest_gradients(self) -> None:
        return None

    def is_used_at_once(self, by: Callable[[], bool]) -> None:
        return None

    def note_short(self, is_short: bool) -> None:
        return None

    def check_process(self) -> None:
        return None


class Home:
    """The way of a gradient back to the host. The host waits for the copy, and no lane does."""

    lane = "host"
    has_room = False

    def __init__(self, store: Resting) -> None:
        self._store = store

    def take_room(self, gradient: Travelling, buffer: GradientBuffer) -> None:
        return None

    def __call__(self, gradient: Travelling) -> Pending:
        exact = gradient.exact
        both = [gradient.landed] if exact is None else [gradient.landed, exact]
        gradient.moves_to(None)  # the leg before holds what is copied
        into = self._store.to_copy_into
        return _Arrival(gradient, [OnHost(each, into(each.numel(), each.dtype)) for each in both])


class _Arrival:
    def __init__(self, gradient: Travelling, copies: list[OnHost]) -> None:
        self._gradient, self._copies = gradient, copies

    def wait(self) -> None:
        self._gradient.moves_to(*(copy.tensor() for copy in self._copies))
