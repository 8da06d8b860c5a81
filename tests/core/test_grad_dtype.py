"""ShardingPolicy(grad_dtype=...): the dtype of the chunk's gradient, and of what autograd hands over."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import zero3
from tests.support import processes
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import process_group
from zero3 import ShardingPolicy

WIDTH = 6
BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


class Summed(nn.Module):
    """Uses its weight three times. The gradients are 1024, 1 and -1024 times the input: in bf16 their sum loses the 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (1024 * x) + self.weight * x - self.weight * (1024 * x) + self.bias.sum()


def model_in(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(Summed(), Summed()).to(dtype)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


CASES = [
    (FP32, ShardingPolicy(param_dtype=BF16, reduce_dtype=FP32, grad_dtype=FP32)),
    (BF16, ShardingPolicy(reduce_dtype=FP32, grad_dtype=FP32)),
    (BF16, ShardingPolicy(grad_dtype=FP32)),
    (FP64, ShardingPolicy(param_dtype=FP32, reduce_dtype=FP64, grad_dtype=FP32)),
    (FP32, ShardingPolicy(param_dtype=BF16, reduce_dtype=FP32, grad_dtype=BF16)),
]


def by_hand(dtype: torch.dtype, policy: ShardingPolicy, world_size: int, micro_batches: int) -> dict[str, Tensor]:
    """Leaves that take gradients in `reduce_dtype`, added up over ranks in it, and over micro-batches in `grad_dtype`."""
    model, compute = model_in(dtype), policy.param_dtype or dtype
    reduce, keep = policy.reduce_dtype or compute, policy.grad_dtype or dtype
    exact: dict[str, Tensor] = {}
    wide = reduce.itemsize > keep.itemsize
    for step in range(micro_batches):
        sums: dict[str, Tensor] = {}
        for rank in range(world_size):
            cast = {name: p.detach().to(compute).requires_grad_() for name, p in model.named_parameters()}
            for leaf in cast.values():
                leaf.grad_dtype = reduce
            functional_call(model, cast, batch(step, rank).to(compute)).float().pow(2).mean().backward()
            sums = {name: sums[name] + leaf.grad if name in sums else leaf.grad for name, leaf in cast.items()}
        mean = {name: value / world_size if wide else value.to(keep) / world_size for name, value in sums.items()}
        exact = {name: exact[name] + value if name in exact else value for name, value in mean.items()}
    return {name: value.to(keep) for name, value in exact.items()}


def sharded(model: nn.Module, group: Any, policy: ShardingPolicy) -> zero3.Zero3Sequential:
    return zero3.Zero3Sequential([zero3.Zero3Layer(child, policy=policy, process_group=group) for child in model.children()])


@WORLDS
@pytest.mark.parametrize(("dtype", "policy"), CASES, ids=str)
@pytest.mark.parametrize("way", ["as it is", "no_sync", "groups", "whole", "transactional"])
def test_grad_dtype_adds_up_as_by_hand(dtype: torch.dtype, policy: ShardingPolicy, world_size: int, way: str) -> None:
    expected = by_hand(dtype, policy, world_size, 3)
    if way == "transactional":
        policy = ShardingPolicy(policy.param_dtype, policy.reduce_dtype, grad_dtype=policy.grad_dtype, transactional=True)
    models = [model_in(dtype) for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        model = sharded(models[group.rank], process_group(group), policy)
        if way in ("groups", "whole"):
            zero3.param_groups(model, lambda name, info: {"whole": True} if way == "whole" else {"decay": "bias" in name})
        for step in range(3):
            with zero3.no_sync(model) if way == "no_sync" and step < 2 else nullcontext():
                model(batch(step, group.rank).to(dtype)).float().pow(2).mean().backward()
        for part in zero3.get_trainable_chunk(model):
            assert part.grad is None or part.grad.dtype == policy.grad_dtype
        zero3.clip_grad_norm_(model, float("inf"))
        with zero3.full_gradients(model) as gradients:
            return dict(gradients)

    # sums come in another order on three ranks, and kept gradients are summed before they are rounded
    tolerance = 2e-2 if way == "no_sync" or BF16 in (policy.grad_dtype, policy.reduce_dtype or policy.param_dtype or dtype) else 1e-6
    for found in run_ranks(world_size, body):
        for name, value in expected.items():
            assert found[name].dtype == policy.grad_dtype
            assert torch.allclose(found[name].double(), value.double(), rtol=tolerance, atol=tolerance), name


@WORLDS
def test_grad_dtype_keeps_what_casting_loses(world_size: int) -> None:
    """The gradient of the first weight is the input's: without it, bf16 sums lose it between 1024 and -1024."""
    models = {dtype: [Summed() for _ in range(world_size)] for dtype in (None, FP32)}
    x = torch.full((1, WIDTH), 1.0)

    def body(group: ThreadCommunicator) -> list[float]:
        found = []
        for dtype, made in models.items():
            policy = ShardingPolicy(param_dtype=BF16, reduce_dtype=FP32, grad_dtype=dtype)
            layer = zero3.Zero3Layer(made[group.rank], policy=policy, process_group=process_group(group))
            layer(x).float().sum().backward()
            with zero3.full_gradients(layer) as gradients:
                found.append(gradients["weight"][0].item())
        return found

    for without, with_it in run_ranks(world_size, body):
        assert (without, with_it) == (0.0, 1.0)


def test_grad_dtype_is_of_floating_chunks_and_a_dtype() -> None:
    with pytest.raises(TypeError, match=r"grad_dtype must be a torch\.dtype"):
        ShardingPolicy(grad_dtype="fp32")  # type: ignore[arg-type]
    model = nn.Module()
    model.weight, model.steps = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    model.forward = lambda x: x * model.weight  # type: ignore[method-assign, operator]
    layer = zero3.Zero3Layer(model, policy=ShardingPolicy(grad_dtype=FP64))
    layer(torch.ones(3)).sum().backward()
    assert zero3.get_trainable_chunk(layer)[0].grad.dtype == FP64
    assert zero3.report(layer).gradients == 3 * 8


def on_a_process(rank: processes.Rank, dtype: torch.dtype, policy: ShardingPolicy) -> dict[str, Tensor]:
    model = sharded(model_in(dtype), None, policy)
    for step in range(3):
        model(batch(step, rank.number)).float().pow(2).mean().backward()
    with zero3.full_gradients(model) as gradients:
        return dict(gradients)


def test_grad_dtype_on_processes() -> None:
    dtype, policy = CASES[0]
    expected = by_hand(dtype, policy, 2, 3)
    for found in processes.on_ranks(2, on_a_process, dtype, policy):
        for name, value in expected.items():
            assert torch.allclose(found[name], value, rtol=1e-6, atol=1e-6), name
