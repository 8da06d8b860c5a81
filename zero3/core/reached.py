"""Which slots of a chunk gradients have reached, on any rank, since its gradient was zeroed.

A parameter that none has reached is left alone, as in plain torch. Ranks tell each other with the
reduction, in the trailer behind each slice. Nothing is noted or read where a rank has reached all
slots itself, as in most models.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

__all__: list[str] = []


class Reached:
    """The attribute `zero3_reached` of a gradient: numbers of slots. A gradient without it is of
    all slots.

    What other ranks say is read when somebody asks: the host waits for it.
    """

    __slots__ = ("_here", "_told", "part")

    def __init__(
        self,
        here: Iterable[int],
        told: Iterable[Tensor] = (),
        part: frozenset[int] = frozenset(),
    ) -> None:
        """`told`: what ranks say together, `[n]`, one for each reduction; compute has waited for
        it when it is read. `part`: the slots that the gradient is for.
        """
        self._here, self._told, self.part = frozenset(here), [*told], part

    def listen(self, trailer: Tensor) -> None:
        """Copies what ranks say out of the trailer of a reduction, in its lane."""
        for told in self._told:
            told.copy_(trailer[: told.numel()])

    def slots(self) -> frozenset[int]:
        """Those of the whole chunk, on all ranks."""
        for told in self._told:
            if not told.is_meta:  # on paper other ranks have nothing to say
                self._here |= {slot for slot, any_rank in enumerate(told.tolist()) if any_rank}
        self._told = []
        return self._here

    @property
    def nothing(self) -> bool:
        """Whether none of the part's slots is among them."""
        return self.part.isdisjoint(self.slots())

    def of(self, part: frozenset[int]) -> Reached:
        return Reached(self._here, self._told, part)

    def joined(self, other: Reached) -> Reached:
        return Reached(self._here | other._here, [*self._told, *other._told], self.part)


def reached_by(gradient: Tensor | None) -> Reached | None:
    """None: all slots, or there is no gradient."""
    return getattr(gradient, "zero3_reached", None)


class Unreached:
    """The slots of a chunk that no gradient has reached since the chunk's was zeroed."""

    __slots__ = ("_all", "landed", "slots")

    def __init__(self, slots: int) -> None:
        self.slots: frozenset[int] = frozenset()
        self.landed: Reached | None = None  # of what is not settled
        self._all = frozenset(range(slots))

    def land(self, reached: Reached | None) -> None:
        """`reached`: by a gradient that lands, None for all."""
        self.landed, self.slots = reached, frozenset()

    def settle(self, gradients: Iterable[Tensor]) -> None:
        """`gradients`: those that this rank's part of the chunk has."""
        of = [reached_by(gradient) for gradient in gradients] or [self.landed]
        found = [reached.slots() for reached in of if reached is not None]
        self.slots, self.landed = frozenset(), None
        if len(found) == len(of):
            self.slots = self._all.difference(*found)

    def forget(self) -> None:
        self.slots = frozenset()
