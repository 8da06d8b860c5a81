"""DDP in real processes: with a plain optimizer, with torch's ZeroRedundancyOptimizer and with ours."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import zero3
from tests.support.processes import Rank, on_ranks

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
