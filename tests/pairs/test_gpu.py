"""Pairs of those capabilities that touch streams, on a real GPU: the ranks are processes that share it, over gloo.

It has what the simulated device lacks: CUDA's own kernels, streams, events and allocator. NCCL refuses two ranks on one device.
"""

from __future__ import annotations

import pytest

from tests.core.test_gpu import REAL
from tests.device.test_pairs import LIVES, life_of
from tests.pairs.covering import live_together
from tests.pairs.exceptions import Names
from tests.pairs.processes import lead
from tests.pairs.rows import ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not REAL, reason="needs a CUDA device: on the simulated one tests/device/test_pairs.py leads these lives"),
]


def _lead(names: Names) -> None:
    lead(names, life_of, "cuda")


@pytest.mark.parametrize("names", LIVES)
def test_all_pairs_live_on_a_gpu_as_in_one_process(names: Names) -> None:
    live_together(names, _lead)


# Those that touch streams are in the lives above.
ALONE = [name for name, row in ROWS.items() if not row.streams and len(life_of((name,)).chapters) == 1]


@pytest.mark.parametrize("name", ALONE)
def test_each_other_row_alone_on_a_gpu(name: str) -> None:
    _lead((name,))
