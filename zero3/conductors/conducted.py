"""A conductor that gives what passes to a function; and the communicator of a layer under `Join`,
whose collectives pass a conductor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..comm.board import Board, board_for
from ..comm.communicator import Communicator
from ..core.collectives import Collective, Conductor

__all__: list[str] = []

_MOVE = (
    "all_gather",
    "reduce_scatter",
    "reduce_pieces",
    "all_to_all",
    "all_reduce",
    "scatter",
    "broadcast",
    "exchange",
    "exchange_later",
)


class Through:
    """Gives each collective to `conduct`, with what performs it by the conductors behind."""

    def __init__(
        self, conduct: Callable[[Collective, Callable[[], Any]], Any], inner: Conductor
    ) -> None:
        self._conduct, self.inner = conduct, inner

    def conduct(self, what: Collective, *, absent: bool = False) -> Any:
        return self._conduct(what, partial(self.inner.conduct, what, absent=absent))


@dataclass(frozen=True, slots=True)
class Other:
    """A collective that a rank without data can't take part in."""

    call: Callable[[], Any]
    layer: Any = None
    moves: ClassVar[bool] = True

    def __str__(self) -> str:
        return "compares with the other ranks, or moves what is no layer's"

    def perform(self) -> Any:
        return self.call()

    take_part = perform


class ConductedCommunicator:
    """A layer's communicator under `Join`. The layer's own gathers and reductions don't use it."""

    takes_pieces = False

    def __init__(self, inner: Communicator, conductor: Conductor) -> None:
        self.inner = inner
        self._conductor = conductor

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return partial(self._conduct, found) if name in _MOVE else found

    def _conduct(self, collective: Callable[..., Any], /, *arguments: Any, **options: Any) -> Any:
        return self._conductor.conduct(Other(partial(collective, *arguments, **options)))

    def same_ranks(self, other: Communicator) -> bool:
        return self.inner.same_ranks(unconducted(other))

    def message_board(self) -> Board | None:
        return board_for(self.inner)


def unconducted(communicator: Communicator) -> Communicator:
    return communicator.inner if isinstance(communicator, ConductedCommunicator) else communicator
