"""The sum of what ranks report when they meet: how many are in each round, and how many gradients
they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..core.collectives import Activity

__all__: list[str] = []


class Standing(NamedTuple):
    """What one rank reports."""

    kind: Activity | None  # its round; None: it has no data
    gradients: int  # how many it holds
    owed: int  # how many of its layers hold sums that are not reduced yet
    changed: bool  # see `StateChanges.changed`
    guarded: bool  # whether its round is inside a `step_guard`

    def numbers(self) -> list[int]:
        """12 integers, which are added over ranks."""
        kind = self.kind
        here = (kind is Activity.STEP, kind not in (Activity.STEP, None), kind is None)
        at_step, elsewhere, without = (
            [self.gradients * place, self.owed * place] for place in here
        )
        rounds = [int(kind is each) for each in Activity]
        flags = [int(self.changed), int(self.guarded and here[1])]
        return [*rounds, *at_step, *elsewhere, *without, *flags]


class Headcount(NamedTuple):
    """The sum over ranks. Ranks at a step wait until all ranks with data are at the step."""

    together: Activity  # the round that comes next
    number: int  # ranks in this round
    waiting: int  # ranks that wait at a step
    without: int  # ranks without data
    apart: str  # the rounds, if ranks with data are in different ones, which is a mistake; else ""
    gradients: int  # gradients of the ranks in this round, all added up
    owed: int  # layers of the ranks in this round that hold sums, all added up
    theirs: int  # gradients of the other ranks, all added up
    changed: bool  # whether any rank has changed what the others can't see
    guarded: bool  # whether this round is inside a `step_guard`

    @classmethod
    def of(cls, counts: Sequence[int], world_size: int) -> Headcount:
        present, held = counts[: len(Activity)], counts[len(Activity) : -2]
        busy = [each for each in Activity if each is not Activity.STEP and present[each]]
        together = busy[0] if busy else Activity.STEP
        waiting = present[Activity.STEP] if busy else 0
        gradients, owed = held[2:4] if busy else held[:2]
        apart = (
            " and ".join(f"{present[each]} in {each.name.lower()}" for each in busy)
            if len(busy) > 1
            else ""
        )
        theirs = held[4] + (held[0] if busy else 0)
        number = present[together]
        return cls(
            together,
            number,
            waiting,
            world_size - number - waiting,
            apart,
            gradients,
            owed,
            theirs,
            counts[-2] > 0,
            counts[-1] > 0,
        )

    @property
    def others(self) -> int:
        return self.waiting + self.without

    @property
    def even(self) -> bool:
        """Whether all ranks hold the same number of gradients, or the ranks in this round hold
        none. (The others can drop theirs.)
        """
        return not self.gradients or self.theirs * self.number == self.gradients * self.others
