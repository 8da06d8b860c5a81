"""zero3.backward: the mean over all tokens of all ranks and micro-batches, against one process on all of them at once."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.models import mlp
from tests.support.ranks import ThreadCommunicator
from tests.support.reference import TOLERANCE, assert_close, full_gradients, on_ranks

# tokens[rank][micro-batch]
UNEVEN = {1: [[3, 1, 5]], 2: [[3, 0, 5], [1, 7, 2]], 3: [[0, 2, 1], [4, 0, 0], [0, 0, 6]]}
NONE = {2: [[0, 0], [0, 0]]}
LATE = {2: [[0, 4], [0, 0]]}


def tokens(rank: int, number: int, count: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + number)
    return torch.randn(count, 5, generator=generator, dtype=torch.float64)


def loss_sum(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).sum()


def expected(counts: list[list[int]], step: int = 0) -> dict[str, Tensor]:
    """One process, one batch of everything, the mean over it."""
    model = mlp()
    everything = torch.cat([tokens(r, n, count, step) for r, row in enumerate(counts) for n, count in enumerate(row)])
    (loss_sum(model, everything) / max(1, len(everything))).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("counts", [*UNEVEN.values(), *NONE.values(), *LATE.values()], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("waits", [False, True])
def test_zero3_backward_equals_one_process_on_the_union(counts: list[list[int]], reduction: Any, waits: bool) -> None:
    world_size = len(counts)
    wanted = expected(counts)

    def shard(model: nn.Module, group: Any, policy: Any) -> nn.Module:
        policy = zero3.ShardingPolicy(gradient_reduction=reduction)
        return zero3.Zero3Sequential([zero3.Zero3Layer(child, policy=policy, process_group=group) for child in model.children()])

    def body(model: Any, group: ThreadCommunicator) -> list[float]:
        losses = []
        row = counts[group.rank]
        for number, count in enumerate(row):
            with zero3.no_sync(model) if waits and number < len(row) - 1 else nullcontext():
                loss = loss_sum(model, tokens(group.rank, number, count))
                losses.append(zero3.backward(loss, torch.tensor(count) if number % 2 else count, model).item())
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")
        return losses

    results = on_ranks(world_size, mlp, body, shard)
    plain = mlp()
    for number in range(len(counts[0])):
        union = torch.cat([tokens(r, number, row[number]) for r, row in enumerate(counts)])
        mean = loss_sum(plain, union).item() / max(1, len(union))
        assert all(losses[number] == pytest.approx(mean, rel=1e-12) for losses in results)
        assert all(losses == results[0] for losses in results)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_zero_grad_begins_a_new_mean(world_size: int, set_to_none: bool) -> None:
    counts = UNEVEN[world_size]
    wanted = [expected(counts, step) for step in range(3)]

    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.0)
        for step in range(3):
            for number, count in enumerate(counts[group.rank]):
                zero3.backward(loss_sum(model, tokens(group.rank, number, count, step)), count, model)
            assert_close(full_gradients(model, group), wanted[step], TOLERANCE, f"gradients of step {step}")
            zero3.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    on_ranks(world_size, mlp, body)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("waits", ["y0yn", "n0n", "y0n", "yy0yyn", "n0y0n", "y00n", "ny0yn", "yn0y0yn"])
def test_zero_grad_between_micro_batches_under_no_sync(waits: str, stage: Any, set_to_none: bool) -> None:
    """y, n: a micro-batch inside no_sync, or outside; 0: zero_grad."""
    counts = [[3, 0, 5, 2, 4, 1], [1, 7, 2, 3, 0, 6]]
    left = [number for number, letter in enumerate(waits) if letter != "0"]
    last = waits.rfind("0")
    everything = [(rank, number) for rank in range(2) for number in left if number > last]
    plain = mlp()
    rows = [tokens(rank, number, counts[rank][number % 6]) for rank, number in everything]
    if rows:
        (loss_sum(plain, torch.cat(rows)) / max(1, sum(map(len, rows)))).backward()
    wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}

    def shard(model: nn.Module, group: Any, policy: Any) -> nn.Module:
        return zero3.shard(model, list(model), policy=zero3.ShardingPolicy(stage=stage), process_group=group)

    def body(model: Any, group: ThreadCommunicator) -> None:
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.0)
        for number, letter in enumerate(waits):
            if letter == "0":
                optimizer.zero_grad(set_to_none=set_to_none)
                continue
            count = counts[group.rank][number % 6]
            with zero3.no_sync(model) if letter == "y" else nullcontext():
                zero3.backward(loss_sum(model, tokens(group.rank, number, count)), count, model)
        zero3.clip_grad_norm_(model, float("inf"))
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")

    on_ranks(2, mlp, body, shard)


def test_gradients_of_another_backward_are_refused() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        x = tokens(group.rank, 0, 3)
        for mixed in (nullcontext(), zero3.no_sync(model)):
            with mixed:
                loss_sum(model, x).backward()
            with pytest.raises(ValueError, match=r"loss\.backward\(\) has left"):
                zero3.backward(loss_sum(model, x), 3, model)
            model.zero_grad()
        zero3.backward(loss_sum(model, x), 3, model)
        loss_sum(model, x).backward()
        with pytest.raises(ValueError, match=r"loss\.backward\(\) has left"):
            zero3.backward(loss_sum(model, x), 3, model)

    on_ranks(2, mlp, body)


def test_zero3_backward_makes_one_small_all_reduce() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        group.log.clear()
        zero3.backward(loss_sum(model, tokens(group.rank, 0, 3)), 3, model)
        assert [(e.numel, e.dtype) for e in group.log if e.kind == "all_reduce"] == [(4, torch.float64)]

    on_ranks(2, mlp, body)


def test_zero3_backward_refuses_what_is_no_sum() -> None:
    model = zero3.Zero3Layer(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="shape"):
        zero3.backward(model(torch.ones(1, 2)), 1, model)
    with pytest.raises(ValueError, match="requires_grad=False"):
        zero3.backward(torch.zeros(()), 1, model)
    with pytest.raises(ValueError, match="num_tokens must be 0 or more, and finite, found -1"):
        zero3.backward(model(torch.ones(1, 2)).sum(), -1, model)
    with pytest.raises(ValueError, match="is sharded"):
        zero3.backward(torch.zeros((), requires_grad=True), 1, nn.Linear(2, 2))


def test_models_of_one_loss_whose_reductions_differ_are_refused() -> None:
    def body(model: Any, group: ThreadCommunicator) -> None:
        other = zero3.Zero3Layer(mlp(), process_group=group, policy=zero3.ShardingPolicy(gradient_reduction="sum"))
        both = nn.ModuleList([other, model])
        with pytest.raises(
            ValueError, match=r"^rank 0: zero3.backward found policy.gradient_reduction='sum' in layer .* and 'mean' in layer"
        ):
            zero3.backward(sum(loss_sum(each, tokens(group.rank, 0, 3)) for each in both), 3, both)  # type: ignore[arg-type]
        for chunk in zero3.get_trainable_chunk(other):
            chunk.requires_grad_(False)  # what does not train need not be alike
        zero3.backward(sum(loss_sum(each, tokens(group.rank, 0, 3)) for each in both), 3, both)  # type: ignore[arg-type]
        assert_close(full_gradients(model, group), wanted, TOLERANCE, "gradients")

    wanted = expected([[3], [3]])
    on_ranks(2, mlp, body)
