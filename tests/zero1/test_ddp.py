"""DDP in real processes: with a plain optimizer, with torch's ZeroRedundancyOptimizer and with ours."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zero3
from tests.support.processes import Rank, on_ranks, try_on_ranks

pytestmark = pytest.mark.slow

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of its imports
    from torch.distributed.optim import ZeroRedundancyOptimizer

OFF = {"debug": "OFF"}  # DDP dies of torch's debug mode here


class Trained(NamedTuple):
    losses: list[float]
    parameters: list[Tensor]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    # the first is larger than a message's worth; small buckets, so that there are several
    return nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 301), nn.Tanh(), nn.Linear(301, 4), nn.LayerNorm(4)).double()


def batches(rank: int, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(5, 16, generator=generator, dtype=torch.float64) for _ in range(count)]


def make(kind: str, ddp: DistributedDataParallel, optimizer_class: Any, options: dict[str, Any]) -> torch.optim.Optimizer:
    if kind == "plain":
        return optimizer_class(ddp.parameters(), **options)
    if kind == "torch":
        return ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class, **options)
    optimizer = zero3.ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class, overlap_with_ddp=kind == "overlap", **options)
    if kind == "overlap":
        ddp.register_comm_hook(None, optimizer.hook(ddp))
    return optimizer


def in_buckets(module: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=0.1, **options)


def train(rank: Rank, kind: str, optimizer_class: Any, options: dict[str, Any], ddp_options: dict[str, Any], steps: int = 5) -> Trained:
    ddp = in_buckets(model(), **ddp_options)
    optimizer = make(kind, ddp, optimizer_class, options)
    losses = []
    for batch in batches(rank.number, steps):
        loss = ddp(batch).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [parameter.detach().clone() for parameter in ddp.parameters()])


def train_all(rank: Rank, kinds: list[str], trained_by: Any, *arguments: Any) -> list[Trained]:
    """One after another in the same processes: their start is what takes time."""
    return [trained_by(rank, kind, *arguments) for kind in kinds]


def compare(world_size: int, kinds: list[str], trained_by: Any, *arguments: Any) -> list[list[Trained]]:
    """What each kind gave on every rank; plain comes first."""
    results = on_ranks(world_size, train_all, ["plain", *kinds], trained_by, *arguments, **OFF)
    return [list(ranks) for ranks in zip(*results, strict=True)]


def assert_equal(found: list[Trained], expected: list[Trained], tolerance: float) -> None:
    for rank, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.losses == pytest.approx(theirs.losses, rel=tolerance), rank
        for number, (a, b) in enumerate(zip(ours.parameters, theirs.parameters, strict=True)):
            assert torch.equal(a, found[0].parameters[number]), f"parameter {number} of rank {rank} is not rank 0's"
            assert (a - b).abs().max() <= tolerance * (1 + b.abs().max()), f"parameter {number} of rank {rank}"


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01}),
        (torch.optim.Adagrad, {"lr": 0.05}),
        (torch.optim.RMSprop, {"lr": 0.01}),
    ],
    ids=["sgd", "adam", "adamw", "adagrad", "rmsprop"],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_under_ddp_as_the_plain_optimizer_and_as_torchs(world_size: int, optimizer_class: Any, options: dict[str, Any]) -> None:
    expected, torchs, ours, overlapping = compare(world_size, ["torch", "zero3", "overlap"], train, optimizer_class, options, {})
    assert expected[0].losses[-1] < expected[0].losses[0]
    assert_equal(torchs, expected, 1e-12)
    assert_equal(ours, expected, 0)
    assert_equal(overlapping, expected, 1e-12)  # DDP's own hook divides before it adds up, and not after


@pytest.mark.parametrize(
    "ddp_options", [{"gradient_as_bucket_view": True}, {"static_graph": True}], ids=lambda options: next(iter(options))
)
def test_with_ddps_options(ddp_options: dict[str, Any]) -> None:
    expected, *found = compare(2, ["zero3", "overlap"], train, torch.optim.Adam, {"lr": 0.01}, ddp_options)
    for kind in found:
        assert_equal(kind, expected, 0)


def train_uneven(rank: Rank, kind: str, counts: list[int], optimizer_class: Any, options: dict[str, Any], by_initial: bool) -> Trained:
    ddp = in_buckets(model())
    optimizer = make(kind, ddp, optimizer_class, options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    losses = []
    joined = [ddp] if kind == "plain" else [ddp, optimizer]
    with Join(joined, divide_by_initial_world_size=by_initial):
        for batch in batches(rank.number, counts[rank.number]):
            loss = ddp(batch).pow(2).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert all(parameter.grad is None for parameter in ddp.parameters()), "a later backward would add to it"
    return Trained(losses, [parameter.detach().clone() for parameter in ddp.parameters()])


@pytest.mark.parametrize("counts", [[0, 3, 5], [5, 0, 3], [4, 4, 1]], ids=str)
def test_join_of_ranks_that_run_out_of_data(counts: list[int]) -> None:
    expected, torchs, *found = compare(3, ["torch", "zero3", "overlap"], train_uneven, counts, torch.optim.Adam, {"lr": 0.01}, True)
    for kind in found:
        assert_equal(kind, expected, 1e-12)
    with pytest.raises(AssertionError):  # if torch repairs its own, our documentation is out of date
        assert_equal(torchs, expected, 1e-3)


@pytest.mark.parametrize("by_initial", [True, False], ids=["by all", "by those with data"])
def test_join_divides_gradients_by_initial_or_remaining_ranks(by_initial: bool) -> None:
    """SGD, since Adam can't see a gradient of the wrong scale."""
    kinds = ["zero3", "overlap"] if by_initial else ["zero3"]
    expected, *found = compare(3, kinds, train_uneven, [0, 3, 5], torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, by_initial)
    for kind in found:
        assert_equal(kind, expected, 1e-12)


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


def early_termination(rank: Rank) -> str:
    ddp = in_buckets(model())
    optimizer = zero3.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)

    def train_until_told() -> None:
        with Join([ddp, optimizer], throw_on_early_termination=True):
            for batch in batches(rank.number, 2 + rank.number):
                ddp(batch).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RuntimeError, match=r"exhausted|Detected at least one rank") as raised:
        train_until_told()
    return str(raised.value)


def test_join_may_end_training_when_the_first_rank_has_no_data() -> None:
    assert on_ranks(2, early_termination, **OFF)[0] == "Rank 0 exhausted all inputs."


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
