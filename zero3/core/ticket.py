"""The one thing that is waited for: a fetch, or a gradient's way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..comm.errors import NamingFailures
from ..comm.streams import Lane, Pending

__all__: list[str] = []


@dataclass(eq=False, slots=True)
class _Leg:
    held: list[object]
    # where the lane is when the leg is over; None if its issue has failed
    mark: Pending | None = None
    after: Pending | None = None  # what the host waits for behind it


class Ticket:
    """Work under way in lanes, leg after leg. A leg holds its memory until compute has waited for
    it: then that may be freed.

    What stands behind a leg may begin the next one: with streams as soon as the leg is issued, on
    the host when it is waited for.
    """

    __slots__ = ("__weakref__", "_into", "_legs", "_names")

    def __init__(self, names: NamingFailures, into: object = None) -> None:
        """`into`: what is added to. After a backward that raised, users may zero gradients before
        anybody has waited.
        """
        self._names, self._into = names, into
        self._legs: deque[_Leg] = deque()

    def go(
        self,
        lane: Lane,
        start: Callable[[], Pending],
        then: Callable[[], None] | None,
        held: object,
    ) -> None:
        """Issues a leg: `start` and, behind what that begins, `then`."""
        leg = _Leg([held])
        self._legs.append(leg)  # first: `then` may issue the leg behind this one
        try:
            with lane.issue():
                leg.mark = lane.complete(start(), then)
        except RuntimeError as failure:
            self._names.explain(failure)
            raise

    def follow(
        self, lane: Lane, start: Callable[[], Pending], then: Callable[[], None], held: object
    ) -> None:
        """Issues a leg behind the present one, in a lane whose order all ranks share: on the host
        `Lane.defer` says when.
        """

        def begin() -> Pending:
            with lane.issue():  # this lane waits for the present one
                return lane.complete(start(), then)

        leg = _Leg([held])
        self._legs.append(leg)
        leg.mark = lane.defer(begin)

    def arrive(self, pending: Pending, *, at_once: bool) -> None:
        """Issues a leg on the host, which waits for `pending`. `at_once`: with the present leg."""
        if at_once:
            self._legs[-1].after = pending
        else:
            self._legs.append(_Leg([], pending))

    def keep_alive(self, tensor: object) -> None:
        """The present leg holds a tensor, too."""
        self._legs[-1].held.append(tensor)

    def advance(self) -> bool:
        """Waits for the next leg, and lets go of what it held. Returns whether another follows."""
        leg = self._legs[0]
        try:
            if leg.mark is not None:  # otherwise its issue has failed
                leg.mark.wait()
            if leg.after is not None:
                leg.after.wait()
        except RuntimeError as failure:
            self._names.explain(failure)
            raise
        self._legs.popleft()
        return bool(self._legs)

    def wait(self) -> None:
        while self._legs:
            self.advance()
