"""What an engine gets of a device: weights on any schedule, and the memory while the model is parked."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.device.test_order import on_host, run
from tests.device.training import Me
from tests.support.models import ONE_GENERATOR

WIDE = 256


def trained(me: Me, how: str = "", **policy: Any) -> tuple[Any, torch.optim.Optimizer]:
    with ONE_GENERATOR:
        torch.manual_seed(0)
        blocks = nn.Sequential(*[nn.Linear(WIDE, WIDE) for _ in range(4)])
    for block in blocks[:2] if how == "frozen" else ():
        block.requires_grad_(False)
    model = zero3.shard(blocks, [*blocks], device=me.device, policy=zero3.ShardingPolicy(**policy))
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01)
    for step in range(2):
        with zero3.no_sync(model) if step and how == "no_sync" else nullcontext():
            model(me.tensor(step, 4, WIDE)).pow(2).mean().backward()
        if not step:
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


PARKED: dict[str, tuple[str, dict[str, Any]]] = {
    "stage 3": ("", {}),
    "stage 2": ("", {"stage": 2}),
    "stage 1": ("", {"stage": 1}),
    "no_sync": ("no_sync", {}),
    "resident_bytes": ("frozen", {"resident_bytes": 10**6}),
    "offload": ("", {"offload": "cpu"}),
}


@pytest.mark.parametrize("name", PARKED)
@pytest.mark.parametrize("to", ["cpu", "files"])
def test_parked_leaves_one_percent_of_the_bytes_on_the_device(to: str, name: str) -> None:
    how, policy = PARKED[name]
    from tests.device import simulated

    simulated.schedule("random", 1)
    nothing = simulated.left_behind()  # it would be freed in between

    def body(me: Me) -> list[Any]:
        model, optimizer = trained(me, how, **policy)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(me.device) - nothing[me.rank]
        with zero3.parked(model, optimizer, to=to if to == "cpu" else me.directory):
            inside = torch.cuda.memory_allocated(me.device) - nothing[me.rank]
        after = torch.cuda.memory_allocated(me.device) - nothing[me.rank]
        if how == "no_sync":
            model(me.tensor(2, 4, WIDE)).pow(2).mean().backward()
        optimizer.step()
        return [before, inside, after, on_host([p.detach() for p in model.parameters()])]

    def plain(me: Me) -> list[torch.Tensor]:
        model, optimizer = trained(me, how, **policy)
        if how == "no_sync":
            model(me.tensor(2, 4, WIDE)).pow(2).mean().backward()
        optimizer.step()
        return on_host([p.detach() for p in model.parameters()])

    whole = 4 * WIDE * (WIDE + 1) * 4 / 2  # a rank's chunks
    parked = run(2, body)
    for (before, inside, after, values), expected in zip(parked, run(2, plain), strict=True):
        if name == "offload":  # nothing of the model was there: what stays is a batch's
            assert before * 100 <= whole
        else:
            assert before > 10**6 and inside * 100 <= before
        assert after <= before
        assert all(torch.equal(one, other) for one, other in zip(values, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["random", "lanes", "compute", "demand"])
@pytest.mark.parametrize("depth", [0, 1])
def test_stream_weights_is_ready_on_the_current_stream_on_any_schedule(policy: str, depth: int) -> None:
    """A consumer that copies later than it asks finds what it was given, until it asks for the next."""
    from tests.device import simulated

    def body(me: Me) -> list[list[torch.Tensor]]:
        model, optimizer = trained(me, prefetch_depth=depth)
        found = []
        for step in range(3):
            optimizer.step()
            copies = [
                tensor * 1 for bucket in zero3.stream_weights(model, max_bytes=(1, 3 * WIDE * WIDE, 10**9)[step]) for _, tensor in bucket
            ]
            model(me.tensor(step, 4, WIDE)).pow(2).mean().backward()
            found.append(on_host(copies))
        return found

    simulated.schedule(eager=True)
    expected = run(2, body)
    for seed in range(3):
        simulated.schedule(policy, seed, progress=0.2, memory="exact")
        assert all(
            torch.equal(a, b)
            for one, other in zip(run(2, body), expected, strict=True)
            for x, y in zip(one, other, strict=True)
            for a, b in zip(x, y, strict=True)
        )
