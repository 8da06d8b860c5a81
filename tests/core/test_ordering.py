"""A whole training step on the fake device: no race as it stands, and one found for every wait that is taken out."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.inside import states_of
from tests.support.ordering import EchoCommunicator, FakeDevice, FakeEvent, FakeStream, release_at_once
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential, clip_grad_norm_, no_sync
from zero3.comm.mesh import MeshCommunicator
from zero3.comm.streams import Done, StreamClock, StreamLane, lanes_for


def train(
    depth: int = 1, steps: int = 3, *, frozen: int | None = None, checkpoint: bool = False, micro_batches: int = 1, mesh: bool = False
) -> EchoCommunicator:
    """Steps of a model of four layers, as a user writes them."""
    communicator = EchoCommunicator()
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    if frozen is not None:
        blocks[frozen].requires_grad_(False)
    policy = ShardingPolicy(prefetch_depth=depth)
    group = MeshCommunicator(communicator, communicator) if mesh else communicator
    layers = [Zero3Layer(block, policy=policy, process_group=group) for block in blocks]
    model = Zero3Sequential(layers)
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        for number in range(micro_batches):
            x = torch.ones(2, 4)
            if checkpoint:
                for layer in model:
                    x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            else:
                x = model(x)
            with no_sync(model, replicas_only=True) if 0 < number < micro_batches - 1 else nullcontext():
                x.pow(2).sum().backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(torch.ones(2, 4))
    return communicator


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("case", [
    {}, {"frozen": 0}, {"frozen": 2}, {"checkpoint": True}, {"micro_batches": 2}, {"mesh": True}, {"mesh": True, "micro_batches": 4}
], ids=str)  # fmt: skip
def test_a_step_has_no_race(fake_device: FakeDevice, depth: int, case: dict[str, object]) -> None:
    train(depth, **case)  # type: ignore[arg-type]
    fake_device.notice_freed()
    assert fake_device.races == []


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_layer_that_was_gathered_for_nothing_is_given_back_when_it_has_come(fake_device: FakeDevice, depth: int) -> None:
    """A backward of some layers alone looks further ahead than it goes."""
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)]
    layers = [Zero3Layer(block, policy=ShardingPolicy(prefetch_depth=depth), process_group=EchoCommunicator()) for block in blocks]
    model, middle = Zero3Sequential(layers), list[Any]()
    layers[1].register_forward_hook(lambda *given: middle.append(given[-1]))
    for _ in range(2):
        loss = model(torch.ones(2, 4, requires_grad=True)).pow(2).sum()
        torch.autograd.grad(loss, middle.pop())
    fake_device.notice_freed()
    assert fake_device.races == []


@pytest.mark.parametrize("mesh", [False, True])
def test_everything_is_allocated_on_the_compute_stream(fake_device: FakeDevice, mesh: bool) -> None:
    """What a lane allocated could be handed out again in the lane's order, behind the back of compute."""
    train(mesh=mesh, micro_batches=4)
    assert fake_device.allocations_on_lanes == []


@pytest.mark.parametrize("separate", [True, False])
def test_separate_backup_group_gives_reductions_a_communicator_of_their_own(separate: bool) -> None:
    communicator = EchoCommunicator()
    communicator.lanes = lanes_for  # type: ignore[method-assign]
    layer = Zero3Layer(nn.Linear(4, 4), process_group=communicator, policy=ShardingPolicy(separate_backup_group=separate))
    layer(torch.ones(2, 4)).sum().backward()
    gathering = {id(who) for who, what in communicator.calls if what == "all_gather"}
    reducing = {id(who) for who, what in communicator.calls if what == "reduce_scatter"}
    assert len(gathering) == len(reducing) == 1
    assert (gathering != reducing) == separate


def test_compute_waits_on_the_lanes_device_whichever_is_current(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model on cuda:1, where nobody has called set_device."""
    computes = {index: FakeStream(index, f"compute of {index}") for index in (0, 1)}

    def current_stream(device: Any = None) -> FakeStream:
        return computes[0 if device is None else torch.device(device).index]

    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    lane = StreamLane(torch.device("cuda", 1))
    with lane.issue():
        mark = lane.complete(Done())
    mark.wait()
    assert any(name.startswith("fetch") for name in computes[1].clock) and list(computes[0].clock) == ["compute of 0"]
    clock = StreamClock(torch.device("cuda", 1))
    assert "compute of 1" in clock.now().clock  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("waiting", "for_", "expected"),
    [
        ("fetch", "compute", "all_gather"),  # the optimizer's step
        ("backup", "compute", "reduce"),  # the gradient
    ],
)
def test_a_lane_that_does_not_wait_for_compute_is_found(
    fake_device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
    waiting: str,
    for_: str,
    expected: str,
) -> None:
    real = FakeStream.wait_stream
    monkeypatch.setattr(FakeStream, "wait_stream", lambda self, other: None if self.name.startswith(waiting) else real(self, other))
    train()
    assert any(f"on {waiting}" in race and f"on {for_}" in race for race in fake_device.races)


@pytest.mark.parametrize("lane", ["fetch", "backup"])
def test_compute_that_does_not_wait_for_a_lane_is_found(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    """fetch: the layer computes with what has not arrived. backup: the optimizer steps with it."""
    real = FakeEvent.record

    def record(event: FakeEvent, stream: FakeStream) -> None:
        if not stream.name.startswith(lane):
            real(event, stream)

    monkeypatch.setattr(FakeEvent, "record", record)
    train()
    assert any("on compute" in race and f"on {lane}" in race for race in fake_device.races)


def test_a_gradient_buffer_given_back_before_its_reduction_is_over_is_found(
    fake_device: FakeDevice,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What `record_stream` on the wrong stream does."""
    release_at_once(monkeypatch)
    train()
    assert any("memory given back" in race for race in fake_device.races)


def test_a_full_buffer_given_back_while_it_is_filled_is_found(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from zero3.core.chunk import Chunk

    def release(chunk: Chunk) -> None:
        chunk.full.free()

    monkeypatch.setattr(Chunk, "release", release)
    monkeypatch.setattr(Chunk, "finish_fetch", lambda chunk: None)
    train()
    assert any("memory given back" in race for race in fake_device.races)


@pytest.mark.parametrize("waits", [True, False])
def test_a_gather_that_other_ranks_alone_need_is_waited_for(fake_device: FakeDevice, monkeypatch: pytest.MonkeyPatch, waits: bool) -> None:
    """Before this rank's optimizer writes what it has sent, and before the memory of what it received is others'."""
    from zero3.core.chunk import Chunk

    begin = Chunk.take_part_in_gather
    if not waits:
        monkeypatch.setattr(Chunk, "take_part_in_gather", lambda *given: begin(*given) and SimpleNamespace(wait=lambda: None))
    layer = Zero3Layer(nn.Linear(4, 4), process_group=EchoCommunicator())
    (state,) = states_of(layer)
    state.take_part_in_gather()
    with torch.no_grad():
        state.chunks[0].shard.mul_(0.5)
    fake_device.notice_freed()
    assert any("memory given back" in race for race in fake_device.races) != waits
    assert any("on compute overwrites what is read by" in race for race in fake_device.races) != waits
