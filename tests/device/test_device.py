"""What the simulated device promises by itself: streams run as late as events allow, memory is reused, collectives order streams."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist


def test_a_stream_that_does_not_wait_sees_old_values() -> None:
    from tests.device import simulated

    simulated.schedule("lanes")
    lane = torch.cuda.Stream()
    x = torch.zeros(4, device="cuda")
    torch.cuda.synchronize()
    x.add_(1)
    with torch.cuda.stream(lane):
        early = x.clone()
    torch.cuda.default_stream().wait_stream(lane)
    assert early.tolist() == [0.0] * 4
    with torch.cuda.stream(lane):
        lane.wait_stream(torch.cuda.default_stream())
        late = x.clone()
    torch.cuda.default_stream().wait_stream(lane)
    assert late.tolist() == [1.0] * 4


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_collective_is_ordered_by_streams(asynchronous: bool) -> None:
    from tests.device import simulated
    from tests.device.ranks import run_ranks

    def body(rank: int) -> list[float]:
        mine, full = torch.full((3,), float(rank), device="cuda"), torch.zeros(6, device="cuda")
        work = dist.all_gather_single(full, mine, async_op=asynchronous)
        assert not torch.cuda.current_stream().query()  # nobody has waited, so nothing has run
        if work is not None:
            work.wait()
        issued.wait()
        values: list[float] = (2 * full).tolist()
        return values

    simulated.schedule("demand")
    issued = threading.Barrier(2)
    assert run_ranks(2, body) == [[0, 0, 0, 2, 2, 2]] * 2
