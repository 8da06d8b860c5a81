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
    """The slots that the gradients of one reduction are of.

    What other ranks say is read when somebody asks: the host waits for it.
    """

    __slots__ = ("_here", "_told")

    def __init__(self, here: Iterable[int], told: Tensor | None) -> None:
        """`told`: takes what ranks say together, `[n]`; None if there is no other rank."""
        self._here, self._told = frozenset(here), told

    def listen(self, trailer: Tensor) -> None:
        """Copies what ranks say out of the trailer of the reduction, in its lane."""
        if self._told is not None:
            self._told.copy_(trailer[: self._told.numel()])

    def slots(self) -> frozenset[int]:
        """Of the whole chunk, on all ranks. Compute has waited for the reduction."""
        told, self._told = self._told, None
        if told is not None and not told.is_meta:  # on paper other ranks have nothing to say
            self._here |= {slot for slot, any_rank in enumerate(told.tolist()) if any_rank}
        return self._here


class Unreached:
    """The slots of a chunk that no gradient has reached since the chunk's was zeroed. The optimizer
    leaves their elements alone, unless somebody else has put a gradient there.
    """

    __slots__ = ("_placed", "_slots", "landed", "maybe")

    def __init__(self) -> None:
        self._slots: frozenset[int] = frozenset()
        self.landed: list[Reached] = []  # what is not read yet
        self.maybe = False  # whether there may be any
        # gradients that were none before these landed, and their versions then, by part
        self._placed: dict[int, tuple[Tensor, int]] = {}

    @property
    def slots(self) -> frozenset[int]:
        landed, self.landed = self.landed, []
        self._slots = self._slots.difference(*(reached.slots() for reached in landed))
        self.maybe = bool(self._slots)
        if not self.maybe:
            self._placed = {}
        return self._slots

    def land(self, reached: Reached | None, zeroed: frozenset[int]) -> None:
        """A gradient lands that has reached these slots, None for all. `zeroed`: those that had
        none.
        """
        if reached is None:
            self.forget()
            self._slots = frozenset()
        else:
            self._slots |= zeroed
            self.landed.append(reached)
        self.maybe = reached is not None

    def place(self, part: int, gradient: Tensor) -> None:
        """It is all that landed in that part."""
        self._placed[part] = gradient, gradient._version

    def is_placed(self, part: int, gradient: Tensor | None) -> bool:
        """Whether nobody has added to it since, as autograd does for a penalty over chunks."""
        placed, version = self._placed.get(part, (None, 0))
        return gradient is not None and placed is gradient and gradient._version == version

    def forget(self) -> None:
        """What has landed is dropped, or everything is known of it."""
        self.landed, self._placed = [], {}
