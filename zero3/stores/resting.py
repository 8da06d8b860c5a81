"""What all stores but `Here` share: a place, a gradient's way there, parameters in use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..comm.streams import OnHost, Pending
from ..core.autograd import as_plain_tensors
from ..core.chunk import Chunk, Store
from ..core.chunk_gradient import SEEN_WITHOUT_VALUES, each_in
from ..core.flow import Travelling
from ..core.gradient_buffer import GradientBuffer
from ..core.sites import become

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


class Keeping(Resting, Protocol):
    """One where gradients are put away."""

    norm_order: float | None  # of the norms to take of gradients when they land

    def keep(self, gradient: Tensor) -> Tensor:
        """A gradient where it rests. It is called while other ranks wait, so it does not raise: if
        there is no room it stays in memory.
        """
        ...

    def rest_gradients(self) -> None:
        """They are not needed for now."""
        ...


def resting_place(chunk: Chunk) -> Resting | None:
    """Where a chunk rests. None: where its layer computes."""
    return chunk.store if chunk.store.rests else None  # type: ignore[return-value]


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
        gradient.exact = None
        del gradient.summed, gradient.landed  # the leg before holds what is copied
        into = self._store.to_copy_into
        return _Arrival(gradient, [OnHost(each, into(each.numel(), each.dtype)) for each in both])


class _Arrival:
    def __init__(self, gradient: Travelling, copies: list[OnHost]) -> None:
        self._gradient, self._copies = gradient, copies

    def wait(self) -> None:
        self._gradient.moves_to(*(copy.tensor() for copy in self._copies))


class WatchedParameter(nn.Parameter):
    """A parameter on the host whose values somebody else uses now. Whoever asks for them calls
    `first`: he may be about to write.

    It is made by switching a parameter's class. It is an ordinary one again when `first` has
    returned, and when the model goes on.
    """

    first: Callable[[], object]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        become(self, nn.Parameter)
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
        become(parameter, WatchedParameter)
    return list(parameters.values())
