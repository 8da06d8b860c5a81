"""Real streams, each held up at random: two ranks on one GPU still train as one process. Marked `gpu`: where there is
none, the simulated device takes its place.

TORCH_CUDA_SANITIZER=1 pytest tests/core/test_gpu_delays.py     torch's race detector watches the same runs
"""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

from tests.core.test_gpu import REAL, batch, blocks
from tests.support.processes import Rank, on_ranks
from zero3 import ShardingPolicy, Zero3Layer, Zero3Sequential, full_state_dict, no_sync, step_guard
from zero3.comm.streams import StreamLane

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, or the simulated one"),
]
CYCLES = 3_000_000  # some ms
PLACES = ("fetch", "backup", "compute", "step")


class Delays:
    def __init__(self, places: tuple[str, ...], seed: int) -> None:
        self._places, self._dice = places, random.Random(seed)

    def at(self, place: str) -> None:
        """Holds up the stream that is current."""
        if place in self._places and self._dice.random() < 0.5:
            torch.cuda._sleep(self._dice.randrange(CYCLES))


def _hold_up_lanes(delays: Delays) -> None:
    real = StreamLane.issue

    class Held:
        def __init__(self, context: AbstractContextManager[object], place: str) -> None:
            self.context, self.place = context, place

        def __enter__(self) -> None:
            self.context.__enter__()
            delays.at(self.place)

        def __exit__(self, *error: Any) -> None:
            self.context.__exit__(*error)

    names: dict[int, str] = {}

    def issue(lane: StreamLane) -> Any:
        return Held(real(lane), names.setdefault(id(lane), ("fetch", "backup")[len(names) % 2]))  # a forward comes first

    StreamLane.issue = issue  # type: ignore[method-assign]  # this process ends with the test


def _train(me: Rank, places: tuple[str, ...], seed: int) -> None:
    rank = me.number
    torch.cuda.set_device(0)
    delays = Delays(places, seed)
    _hold_up_lanes(delays)
    policy = ShardingPolicy(prefetch_depth=seed % 3, transactional=seed % 2 == 1)
    sharded = Zero3Sequential([Zero3Layer(block, policy=policy) for block in blocks()])
    for layer in sharded:
        layer.module.register_forward_pre_hook(lambda *_: delays.at("compute"))
        layer.module.register_full_backward_hook(lambda *_: delays.at("compute"))
    plain = nn.Sequential(*blocks())
    mine = torch.optim.SGD(sharded.get_trainable_chunk(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):  # inputs that need gradients: a full backward hook on a first layer warns without
        with no_sync(sharded):
            sharded(batch(step, rank).requires_grad_()).pow(2).mean().backward()
        with step_guard(sharded):
            sharded(batch(100 + step, rank).requires_grad_()).pow(2).mean().backward()
        delays.at("step")
        mine.step()
        mine.zero_grad()
        for number in (step, 100 + step):
            plain(torch.cat([batch(number, r) for r in range(2)])).pow(2).mean().backward()
        reference.step()
        reference.zero_grad()
    for name, value in full_state_dict(sharded, rank0_only=False).items():
        torch.testing.assert_close(value, plain.state_dict()[name].cpu(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("places", [PLACES, *((place,) for place in PLACES if REAL)], ids=lambda places: "+".join(places))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_delay_changes_what_is_computed(places: tuple[str, ...], seed: int) -> None:
    on_ranks(2, _train, places, seed, fresh=True)  # lanes are held up for good in these processes
