"""`overlap_with_ddp=True`: updates inside DDP's backward, in real processes, beside torch's own ZeroRedundancyOptimizer."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zero3
from tests.support.processes import Rank, on_ranks, try_on_ranks
from tests.zero1.test_ddp import OFF, Trained, assert_equal, batches, compare, in_buckets, make, model, train

pytestmark = pytest.mark.slow


def accumulate_in_groups(rank: Rank, kind: str) -> Trained:
    """Two micro-batches a step, two groups, a schedule, and (where we overlap) no call of step() at all."""
    ddp = in_buckets(model())
    groups = [{"params": list(ddp.parameters())[:3], "lr": 0.02}, {"params": list(ddp.parameters())[3:], "weight_decay": 0.1}]
    if kind == "plain":
        optimizer: Any = torch.optim.AdamW(groups, lr=0.01)
    else:
        optimizer = zero3.ZeroRedundancyOptimizer(groups, torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
        ddp.register_comm_hook(None, optimizer.hook(ddp))
    losses = []
    for number, batch in enumerate(batches(rank.number, 8)):
        with ddp.no_sync() if number % 2 == 0 else contextlib.nullcontext():
            loss = ddp(batch).pow(2).mean()
            loss.backward()
        losses.append(loss.item())
        if number % 2:
            if kind == "plain":
                optimizer.step()
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
    return Trained(losses, [parameter.detach().clone() for parameter in ddp.parameters()])


def test_overlap_with_ddp_with_accumulation_groups_and_a_schedule() -> None:
    expected, found = compare(2, ["overlap"], accumulate_in_groups)
    assert_equal(found, expected, 1e-14)


def overlapping_wrongly(rank: Rank) -> None:
    module = model()
    ddp = in_buckets(module)
    overlapping = zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(RuntimeError, match=r"ddp.register_comm_hook\(None, optimizer.hook\(ddp\)\) once"):
        overlapping.step()
    with pytest.raises(ValueError, match="overlap_with_ddp=True"):
        zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1).hook(ddp)
    with pytest.raises(ValueError, match="find_unused_parameters=True"):
        overlapping.hook(in_buckets(module, find_unused_parameters=True))
    with pytest.raises(ValueError, match="parameter 0 of group 0 of the optimizer is no parameter of the DistributedDataParallel model"):
        overlapping.hook(in_buckets(model()))
    with pytest.raises(ValueError, match="use overlap_with_ddp=False"):
        Join([ddp, overlapping], divide_by_initial_world_size=False)
    overlapping.hook(ddp)
    with pytest.raises(RuntimeError, match=r"before hook\(ddp\)"):
        overlapping.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match="_Counting can't run during backward"):
        zero3.ZeroRedundancyOptimizer(ddp.parameters(), _Counting, overlap_with_ddp=True)
    zero3.ZeroRedundancyOptimizer(ddp.parameters(), _Counting)


def saved_and_continued(rank: Rank) -> tuple[list[Tensor], list[Tensor]]:
    """Two steps, a checkpoint, two steps; and the last two again from the checkpoint, by a plain optimizer."""

    def started() -> tuple[DistributedDataParallel, Any]:
        ddp = in_buckets(model())
        optimizer = zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01)
        ddp.register_comm_hook(None, optimizer.hook(ddp))
        return ddp, optimizer

    def run(ddp: DistributedDataParallel, steps: slice, optimizer: Any = None) -> list[Tensor]:
        for batch in batches(rank.number, 4)[steps]:
            ddp.zero_grad()
            ddp(batch).pow(2).mean().backward()
            if optimizer is not None:
                optimizer.step()
        return [parameter.detach().clone() for parameter in ddp.parameters()]

    ddp, optimizer = started()
    half = run(ddp, slice(2))
    optimizer.consolidate_state_dict(to=1)
    box = [optimizer.state_dict() if rank.number == 1 else None]
    dist.broadcast_object_list(box, src=1)
    expected = run(ddp, slice(2, 4))
    with pytest.raises(RuntimeError, match="changed since"):
        optimizer.state_dict()
    found = []
    for kind in ("overlap", "plain"):
        again, other = started() if kind == "overlap" else (in_buckets(model()), None)
        other = other or torch.optim.AdamW(again.parameters())
        other.load_state_dict(box[0])
        with torch.no_grad():
            for parameter, value in zip(again.parameters(), half, strict=True):
                parameter.copy_(value)
        found.append(run(again, slice(2, 4), other if kind == "plain" else None))
    assert all(torch.equal(a, b) for a, b in zip(found[0], expected, strict=True))
    return expected, found[1]


def test_consolidate_state_dict_with_overlap_with_ddp() -> None:
    for expected, plain in on_ranks(2, saved_and_continued, **OFF):
        torch.testing.assert_close(plain, expected, rtol=1e-12, atol=1e-12)


class _Detached(nn.Module):
    """Its weight's gradient is complete before the backward needs the weight's value for the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return (nn.functional.linear(self.first(x), self.weight.detach()) * self.scale) @ self.weight


def needed_after_its_update(rank: Rank) -> None:
    ddp = DistributedDataParallel(_Detached(), bucket_cap_mb=1e-5)  # a bucket for each parameter
    optimizer = zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, optimizer.hook(ddp))
    # DDP's first buckets are in the order of the parameters, those that it builds anew in the order of their gradients
    ddp(torch.ones(2, 4)).sum().backward()
    ddp(torch.ones(2, 4)).sum().backward()


def test_overlap_with_ddp_does_not_change_a_value_that_the_backward_still_needs() -> None:
    for outcome in try_on_ranks(2, needed_after_its_update, **OFF):
        assert outcome.error == "RuntimeError" and "modified by an inplace operation" in outcome.text


class _Counting(torch.optim.SGD):
    """Elementwise, but its rate falls with every call of step()."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.param_groups[0]["lr"] *= 0.5
        return result


def test_overlap_with_ddp_refuses_what_can_not_overlap() -> None:
    on_ranks(2, overlapping_wrongly, **OFF)


def in_half_precision(rank: Rank, kind: str) -> Trained:
    """Gradients that travel as fp16, by a communication hook of torch's own."""
    ddp = in_buckets(model().float())
    optimizer = make("plain" if kind == "plain" else "zero3", ddp, torch.optim.SGD, {"lr": 0.1})
    if kind == "overlap":
        optimizer = zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, optimizer.hook(ddp, fp16_compress_hook) if kind == "overlap" else fp16_compress_hook)
    for batch in batches(rank.number, 3):
        ddp(batch.float()).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trained([], [parameter.detach().clone() for parameter in ddp.parameters()])


def test_overlap_with_ddp_by_another_hooks_reduction() -> None:
    expected, ours, overlapping = compare(2, ["zero3", "overlap"], in_half_precision)
    assert_equal(ours, expected, 0)
    assert_equal(overlapping, expected, 0)
    without, _ = compare(2, ["zero3"], train, torch.optim.SGD, {"lr": 0.1}, {}, 3)
    assert not torch.equal(without[0].parameters[0].float(), expected[0].parameters[0]), "the hook has done nothing"


def looking_between(rank: Rank, looks: bool) -> Trained:
    """Rank 0 runs out of data. Each rank sets its lr; a forward without backward comes after each step."""
    ddp = in_buckets(model())
    optimizer = zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.02)
    ddp.register_comm_hook(None, optimizer.hook(ddp))
    with Join([ddp, optimizer]):
        for number, batch in enumerate(batches(rank.number, 2 + 3 * rank.number)):
            optimizer.param_groups[0]["lr"] = 0.02 / 2**number
            ddp(batch).pow(2).mean().backward()
            optimizer.zero_grad()
            if looks:
                with ddp.no_sync(), torch.no_grad():
                    ddp(batch)
    return Trained([], [parameter.detach().clone() for parameter in ddp.parameters()])


def test_a_forward_without_backward_is_no_data() -> None:
    expected, found = (on_ranks(2, looking_between, looks, **OFF) for looks in (False, True))
    assert_equal(found, expected, 0)


def scheduled_after_join(rank: Rank) -> None:
    """Schedules have come apart where ranks had different numbers of batches."""
    ddp = in_buckets(model())
    optimizer = zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.02)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    with Join([ddp, optimizer]):
        for batch in batches(rank.number, 1 + rank.number):
            ddp(batch).pow(2).mean().backward()
            optimizer.step()
            schedule.step()
    ddp(batch).pow(2).mean().backward()
    with pytest.raises(ValueError, match=r"ranks differ in what a step updates: rank 0: group 0, changed since the last step: .*lr "):
        optimizer.step()


def test_schedules_that_have_come_apart_are_told_to_all() -> None:
    on_ranks(2, scheduled_after_join, **OFF)
