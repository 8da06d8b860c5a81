"""Every pair of capabilities on processes over gloo, whose transfers, tags and shared memory threads do not have."""

from __future__ import annotations

import pytest

from tests.pairs.covering import live_together
from tests.pairs.exceptions import Names
from tests.pairs.life import Life
from tests.pairs.processes import lead
from tests.pairs.rows import ROWS
from tests.pairs.test_pairs import LIVES


def life_of(names: Names) -> Life:
    return Life([row for name, row in ROWS.items() if name in names])


TOGETHER = [names for names in LIVES if len(life_of(names).chapters) == 1]


@pytest.mark.slow
@pytest.mark.parametrize("names", TOGETHER, ids=" + ".join)
def test_all_pairs_live_on_processes_as_in_one(names: Names) -> None:
    live_together(names, lambda rows: lead(rows, life_of))
