"""Pairs of those capabilities that touch streams, on a real GPU: the ranks are processes that share it, over gloo.

It has what the simulated device lacks: CUDA's own kernels, streams, events and allocator. NCCL refuses two ranks on one device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.core.test_gpu import REAL
from tests.device.test_pairs import LIVES, life_of, mesh_of, ranks_in
from tests.pairs.covering import live_together
from tests.pairs.exceptions import Names
from tests.pairs.life import Place, World, live
from tests.pairs.rows import ROWS
from tests.support.processes import Rank, on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not REAL, reason="needs a CUDA device: on the simulated one tests/device/test_pairs.py leads these lives"),
]


def _rank_of(me: Rank, names: Names) -> None:
    """Each rank leads the life in one process too, on the same GPU."""
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    warnings.filterwarnings("ignore", message="The .grad attribute")  # dynamo looks, whoever's tensor it is

    def launch(world: World, body: Callable[[Place], Any], parts: int = 1) -> list[Any]:
        return [body(Place(me.number, me.world_size, mesh_of(world, parts), device))]

    live(life_of(names), launch, me.scratch, device)


def _lead(names: Names) -> None:
    (world,) = life_of(names).chapters
    on_ranks(ranks_in(world), _rank_of, names)


@pytest.mark.parametrize("names", LIVES)
def test_all_pairs_live_on_a_gpu_as_in_one_process(names: Names) -> None:
    live_together(names, _lead)


# Those that touch streams are in the lives above.
ALONE = [name for name, row in ROWS.items() if not row.streams and len(life_of((name,)).chapters) == 1]


@pytest.mark.parametrize("name", ALONE)
def test_each_other_row_alone_on_a_gpu(name: str) -> None:
    _lead((name,))
