"""NCCL's means in place of sums that are divided, where they are exact: the same bits, and a kernel less for each layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from tests.device.scenarios import SCENARIOS
from tests.device.test_order import on_host, run
from tests.device.test_parity import assert_same
from tests.device.training import Me, loss_of, sharded

pytestmark = pytest.mark.slow


def with_and_without(world_size: int, body: Callable[[Me], Any], then: Callable[[list[Any]], Any] = list) -> tuple[Any, Any]:
    """What `then` makes of what ranks return, and what it is where sums are divided."""
    from tests.device import simulated
    from zero3.build import axes

    simulated.schedule("random", 1, progress=0.1)
    found = then(run(world_size, body))
    with patch.object(axes, "averages", lambda communicator: False):
        return found, then(run(world_size, body))


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("prefetch_depth_1", 2), ("prefetch_depth_1", 3), ("bf16", 4), ("stage_1", 2),
        ("uneven_inputs", 4), ("mesh_bf16_depth_2", 4), ("mesh_no_sync", 4), ("mesh_uneven_inputs", 4),
    ],
)  # fmt: skip
def test_training_has_the_bits_of_sums_that_are_divided(name: str, world_size: int) -> None:
    def body(me: Me) -> list[Tensor]:
        return on_host(list(SCENARIOS[name](me)))

    assert_same(*with_and_without(world_size, body))


@pytest.mark.parametrize(("world_size", "fewer"), [(2, 5), (4, 5), (3, 0)])
def test_a_layer_has_a_kernel_less_in_its_reductions_lane(world_size: int, fewer: int) -> None:
    """Of four blocks and the root, on each rank."""
    from tests.device import simulated

    def body(me: Me) -> None:
        loss_of(sharded(me), me, 0).backward()

    def kernels(_: Any) -> int:
        return sum(entry[:2] == ("k", "aten::div.out") for entry in simulated.C.take_log())

    simulated.C.take_log()
    simulated.C.log(True)
    try:
        counts = with_and_without(world_size, body, kernels)
    finally:
        simulated.C.log(False)
    assert counts[1] - counts[0] == fewer * world_size
