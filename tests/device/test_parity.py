"""Every capability on the simulated device: whatever order streams work in, the numbers are those of the CPU. That they are the bits of
execution in order is what soak.py compares, for any scenario and any order.
"""

from __future__ import annotations

import shutil
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.device.scenarios import ON_MESHES, SCENARIOS, Scenario
from tests.device.training import Me, scratch
from tests.support import ranks as cpu

pytestmark = pytest.mark.slow

MESHES = {SCENARIOS[name] for name in ON_MESHES}  # on four ranks, all others on two
# Two communicators are at work at once in these, so they need room for two: see test_communicators.py.
TWO_COMMUNICATORS = MESHES | {SCENARIOS["separate_backup_group"], SCENARIOS["offload_and_a_frozen_first_layer"]}
TWO_COMMUNICATORS |= {scenario for name, scenario in SCENARIOS.items() if name.startswith("experts_at_home")}  # tokens have their own


class Setting(NamedTuple):
    policy: str
    memory: str
    seed: int
    progress: float = 0.0
    room: int = 0  # collectives that wait for other ranks, and that a device can hold at once; 0: any number

    def __str__(self) -> str:
        return f"{self.policy}-{self.memory}"


SETTINGS = [
    Setting("random", "strict", 0),
    Setting("random", "exact", 1, 0.2, room=1),
    Setting("lanes", "strict", 2),
    Setting("compute", "exact", 3, 0.1),
    Setting("demand", "strict", 4),
    Setting("demand", "exact", 5, 0.2),
]
# One capability or two, which live with every other one in an order that is drawn: see test_pairs.py. soak.py and faults.py run them.
IN_PAIRS = {
    *("prefetch_depth_0", "prefetch_depth_1", "prefetch_depth_2", "grad_dtype", "stage_1", "stage_2", "transactional", "dynamic"),
    *("separate_backup_group", "kept_between_forward_and_backward", "checkpoint_not_reentrant", "compressed", "compressed_stage_2"),
    *("compressed_transactional", "step_guard", "grad_scaler", "param_groups_whole", "evaluation_between_steps", "mean_over_tokens"),
    *("two_forwards_before_one_backward", "uneven_inputs", "uneven_inputs_and_step_guard", "an_exception_and_on", "resident", "by_hand"),
    *("compressed_whole_parameters", "compressed_exception_and_on", "no_sync"),
}
# Each other scenario has one of them, in turn.
ORDERS = [
    pytest.param(name, setting, id=f"{name}-{setting}")
    for at, name in enumerate(name for name in SCENARIOS if name not in IN_PAIRS)
    for number, setting in enumerate(SETTINGS)
    if (at + number) % len(SETTINGS) == 0
]
NEEDS_A_GROUP = {name for name in SCENARIOS if "uneven_inputs" in name}  # torch's Join does not work on threads of the CPU


@cache
def _first_bf16() -> None:
    """After the first product in bf16 of a process, torch's CPU kernels round fp32 differently, in the last bit: so it comes first."""
    x = torch.ones(4, 4, device="cuda", dtype=torch.bfloat16)
    nn.functional.linear(x, x).cpu()


def on_device(scenario: Scenario) -> list[list[Tensor]]:
    from tests.device.ranks import run_ranks

    _first_bf16()
    directory, world = scratch(), 4 if scenario in MESHES else 2

    def body(rank: int) -> list[Tensor]:
        me = Me(rank, world, torch.device("cuda", rank), None, directory)
        return [each.cpu() for each in scenario(me)]

    try:
        return run_ranks(world, body)
    finally:
        shutil.rmtree(directory)


def on_cpu(scenario: Scenario) -> list[list[Tensor]]:
    directory = scratch()

    def body(group: Any) -> list[Tensor]:
        return list(scenario(Me(group.rank, group.world_size, torch.device("cpu"), group, directory)))

    try:
        return cpu.run_mesh(2, 2, body) if scenario in MESHES else cpu.run_ranks(2, body)
    finally:
        shutil.rmtree(directory)


@cache
def in_order(scenario: Scenario) -> list[list[Tensor]]:
    from tests.device import simulated

    simulated.schedule(eager=True)
    return on_device(scenario)


def in_any_order(scenario: Scenario, setting: Setting) -> list[list[Tensor]]:
    from tests.device import simulated

    simulated.schedule(setting.policy, setting.seed, progress=setting.progress, memory=setting.memory)
    simulated.C.set_room(0 if scenario in TWO_COMMUNICATORS else setting.room)
    try:
        return on_device(scenario)
    finally:
        simulated.C.set_room(0)


def assert_same(found: list[list[Tensor]], expected: list[list[Tensor]], tolerance: float = 0) -> None:
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            place = f"value {number} of rank {rank}: "
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=place.__add__)


@pytest.mark.parametrize(("name", "setting"), ORDERS)
def test_in_any_order_the_numbers_are_those_of_the_cpu(name: str, setting: Setting) -> None:
    if name in NEEDS_A_GROUP:
        assert_same(in_any_order(SCENARIOS[name], setting), in_order(SCENARIOS[name]))
    else:
        assert_same(in_any_order(SCENARIOS[name], setting), on_cpu(SCENARIOS[name]), 1e-6)
