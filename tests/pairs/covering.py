"""Few lives that hold all pairs: each is of several rows, and so of several pairs at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

from tests.pairs.exceptions import Names
from tests.pairs.rows import ROWS

SIZE = 4  # rows in a life


def tolerance(names: Iterable[str]) -> float:
    return max(ROWS[name].tolerance for name in names)


def held(life: Names) -> set[Names]:
    """The pairs that the life holds, as exactly as it would hold each alone."""
    return {pair for pair in itertools.combinations(life, 2) if tolerance(pair) == tolerance(life)}


def covering(pairs: list[Names], size: int = SIZE) -> list[Names]:
    """Lives of at most `size` rows: each of `pairs` is in one of them at least, and they hold no other pair."""
    known, left, lives = set(pairs), dict.fromkeys(pairs), list[Names]()
    rows = [name for name in ROWS if any(name in pair for pair in pairs)]

    def joined(life: Names, name: str) -> Names:
        return tuple(row for row in rows if row in life or row == name)

    def gain(life: Names) -> int:
        return len(held(life) & left.keys()) if known.issuperset(itertools.combinations(life, 2)) else 0

    while left:
        life = next(iter(left))
        while len(life) < size:
            wider = max((joined(life, name) for name in rows if name not in life), key=gain, default=life)
            if tolerance(wider) > tolerance(life) or gain(wider) <= gain(life):
                break
            life = wider
        lives.append(life)
        for pair in held(life):
            left.pop(pair, None)
    return lives


def live_together(names: Names, lead: Callable[[Names], None]) -> None:
    """Leads the life. If it fails, the error names those of its pairs that fail alone, too."""
    try:
        lead(names)
    except Exception as error:
        guilty = []
        for pair in itertools.combinations(names, 2):
            try:
                lead(pair)
            except Exception:
                guilty.append(" + ".join(pair))
        raise AssertionError(f"{' + '.join(names)}: {error!r}. Alone fails: {', '.join(guilty) or 'no pair of them'}") from error
