"""Each wait, hold and order of docs/design.md's table is taken out, and the device sees it. docs/reliability.md tells what sees what."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

NAMES = [
    "the fetch lane does not wait for compute",
    "the backup lane does not wait for compute",
    "the layer computes without waiting for its gather",
    "the optimizer steps without waiting for reductions",
    "a reduction's buffers are given back at once",
    "an earlier reduction is dropped, not waited for",
    "the full buffer is allocated on another stream",
    "a lane's event is recorded before the sum lands",
    "the sum lands beside its lane",
    "compute waits on the current device, not on the model's",
    "a lane waits for the current device, not for the model's",
    "a sum over replicas does not wait for the reduction",
    "the optimizer steps without waiting for sums over replicas",
    "the buffers of a sum over replicas are given back at once",
    "what a replica has kept is given back while its lane reads it",
    "what a gather brings is given back before it is decoded",
    "what a gather brings is allocated on another stream",
    "gradients' codes are given back at once",
    "gradients are given back while they are encoded",
    "a sum over replicas does not wait until gradients are decoded",
    "an activation is used before it is back, and freed before it is out",
    "a graph is dropped while activations come back",
    "a file's activation is written before it is on the host",
    "the host takes a gradient before it has come",
    "a gradient is copied to the host beside its lane",
    "a gradient's buffers are given back before it is on the host",
    "a chunk is copied to the device beside the fetch lane",
    "the memory in which a chunk is cast is given back at once",
    "the host writes a chunk that is being copied, after a forward",
    "the host writes a chunk that is being copied, after a forward with gradients",
    "the host writes a chunk that is being copied, after a backward",
    "the host writes a chunk that is being copied, after full_params",
    "gradients on the host are unscaled by a number that has not come",
]

TRIES = 8  # ranks are threads, so what meets what differs from run to run


@pytest.mark.parametrize("name", NAMES)
def test_fault_is_seen(name: str) -> None:
    from tests.device.faults import FAULTS, first_sight

    fault = next(fault for fault in FAULTS if fault.name == name)
    assert first_sight(fault, TRIES * [fault.scenario])


def test_without_a_fault_nothing_is_seen() -> None:
    from tests.device.faults import Fault, broken, first_sight

    none = Fault("none", "core/chunk.py", "        self._in_flight: Mark | None = None\n", "        self._in_flight: Mark | None = None\n")
    with broken(none) as scenarios:
        import zero3

        assert scenarios.steps.zero3 is zero3
    assert not first_sight(none, [none.scenario])
