"""What the simulated device promises by itself: streams run as late as events allow, memory is reused, collectives order streams."""

from __future__ import annotations

import threading
from collections.abc import Callable

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


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_collective_gives_what_it_should(asynchronous: bool) -> None:
    """Of three ranks, and of two of them. Slices may be of unequal sizes."""
    from tests.device import simulated
    from tests.device.ranks import run_ranks

    sizes = [2, 0, 3]

    def body(rank: int) -> dict[str, list[float]]:
        def full(numel: int, value: float = rank) -> torch.Tensor:
            return torch.full((numel,), float(value), device="cuda")

        pair = dist.new_group([0, 2])
        gathered, mine, summed, dealt = [full(size) for size in sizes], full(sizes[rank], -1), full(2), full(1)
        swapped = full(3 * sizes[rank], -1)
        of_two, largest, mean, told = full(4), full(2), full(2), full(2)
        slices = [full(1, 10 + each) for each in range(3)] if rank == 0 else None
        works = [
            dist.all_gather(gathered, full(sizes[rank], rank + 1), async_op=asynchronous),
            dist.reduce_scatter(mine, [full(size) for size in sizes], async_op=asynchronous),
            dist.all_reduce(summed, async_op=asynchronous),
            dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=asynchronous),
            dist.all_reduce(mean, dist.ReduceOp.AVG, async_op=asynchronous),
            dist.broadcast(told, 1, async_op=asynchronous),
            dist.scatter(dealt, slices, async_op=asynchronous),
            dist.all_to_all_single(swapped, full(5, rank + 1), [sizes[rank]] * 3, sizes, async_op=asynchronous),
            *([dist.all_gather(list(of_two.chunk(2)), full(2), group=pair, async_op=asynchronous)] if rank != 1 else []),
        ]
        for work in works:
            assert (work is not None) == asynchronous
            if work is not None:
                work.wait()
        found = {"all_gather": torch.cat(gathered), "reduce_scatter": mine, "sum": summed, "max": largest, "mean": mean}
        found |= {"broadcast": told, "scatter": dealt, "of two": of_two, "all_to_all": swapped}
        values = {name: tensor.tolist() for name, tensor in found.items()}
        dist.barrier()
        return values

    simulated.schedule("demand")
    for rank, found in enumerate(run_ranks(3, body, bind=True)):
        assert found == {
            "all_gather": [1, 1, 3, 3, 3],
            "reduce_scatter": [3] * sizes[rank],
            "sum": [3, 3],
            "max": [2, 2],
            "mean": [1, 1],
            "broadcast": [1, 1],
            "scatter": [10 + rank],
            "all_to_all": [source for source in (1, 2, 3) for _ in range(sizes[rank])],
            "of two": [1] * 4 if rank == 1 else [0, 0, 2, 2],
        }


def test_shapes_that_are_known_are_those_of_the_question() -> None:
    """Each call is made twice, beside others that differ in one thing only. Plain torch says what comes of it."""
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "wide": lambda x: x * 2,
        "of whole numbers": lambda x: (10 * x).int() * 2,
        "and a fraction": lambda x: (10 * x).int() * 2.5,
        "half": lambda x: x.bfloat16() * 2,
        "turned": lambda x: x.t() * 2,
        "a number": lambda x: x + torch.tensor(3),
        "a wide number": lambda x: x.bfloat16() + torch.tensor(3.0, dtype=torch.float64),
        "sums of rows": lambda x: x.sum(0),
        "of columns": lambda x: x.sum(1),
        "that stay": lambda x: x.sum(1, keepdim=True),
        "in fp64": lambda x: x.sum(1, dtype=torch.float64),
        "one after another": lambda x: torch.cat([x, x]),
        "side by side": lambda x: torch.cat([x, x], 1),
        "normalised": lambda x: torch.layer_norm(x, (4,)),  # torch makes no `out` for it
        "normalised, half": lambda x: torch.layer_norm(x.bfloat16(), (4,)),
        "normalised, turned": lambda x: torch.layer_norm(x.t().contiguous(), (3,)),
        "an out that is too small": lambda x: torch.mul(x, 2, out=x.new_empty(0)),
        "an out that fits": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
    }
    host = torch.arange(12.0).view(3, 4) / 8
    for _ in range(2):
        for name, call in calls.items():
            found, expected = call(host.to("cuda")), call(host)
            assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype), name
            torch.testing.assert_close(found.cpu(), expected)
