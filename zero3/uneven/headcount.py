"""What ranks say when they meet, added up: who is there and for what, and how many gradients they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..core.coordination import Activity

__all__: list[str] = []


def said(kind: Activity | None, gradients: int, owed: int, *, changed: bool) -> list[int]:
    """One rank's part. `kind`: None without data. `owed`: layers with sums that are yet to be reduced. 88 bytes to be added up."""
    here = (kind is Activity.STEP, kind not in (Activity.STEP, None), kind is None)
    at_step, elsewhere, without = ([gradients * place, owed * place] for place in here)
    return [*(int(kind is each) for each in Activity), *at_step, *elsewhere, *without, int(changed)]


class Headcount(NamedTuple):
    """The sum over ranks. Those that are at a step wait until all that have data are."""

    together: Activity  # what the ranks do that go on
    number: int  # of these
    waiting: int  # at a step
    without: int  # ranks that have no data
    apart: str  # which other things ranks do: a mistake; "" if none
    gradients: int  # of those that go on, as many each
    owed: int
    theirs: int  # gradients of those that don't
    changed: bool

    @classmethod
    def of(cls, counts: Sequence[int], world_size: int) -> Headcount:
        present, held = counts[: len(Activity)], counts[len(Activity) : -1]
        busy = [each for each in Activity if each is not Activity.STEP and present[each]]
        together = busy[0] if busy else Activity.STEP
        waiting = present[Activity.STEP] if busy else 0
        gradients, owed = held[2:4] if busy else held[:2]
        apart = " and ".join(f"{present[each]} in {each.name.lower()}" for each in busy) if len(busy) > 1 else ""
        theirs = held[4] + (held[0] if busy else 0)
        number = present[together]
        return cls(together, number, waiting, world_size - number - waiting, apart, gradients, owed, theirs, counts[-1] > 0)

    @property
    def others(self) -> int:
        return self.waiting + self.without

    @property
    def even(self) -> bool:
        """Whether all ranks hold as many gradients, or those that go on none: the others can drop theirs too."""
        return not self.gradients or self.theirs * self.number == self.gradients * self.others
