"""ShardingPolicy(grad_dtype=...): the dtype of the chunk's gradient, and of what autograd hands over."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import zero3
from tests.support import processes
from tests.support.models import WORLDS
from tests.support.ranks import ThreadCommunicator, ThreadMesh, run_mesh, run_ranks
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
@pytest.mark.parametrize("transactional", [False, True])
def test_parts_of_a_chunk_add_up_as_exactly_as_the_chunk(world_size: int, transactional: bool) -> None:
    """Each sum is rounded once, whatever has become of the other parts' gradients: the same bits."""
    policy = ShardingPolicy(BF16, FP32, grad_dtype=BF16, transactional=transactional)
    ways: dict[str, Any] = {"chunk": None, "groups": {"decay": 0}, "whole": {"whole": True}}
    model_of_all = nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, 5))
    models = {way: [deepcopy(model_of_all) for _ in range(world_size)] for way in ways}

    def body(group: ThreadCommunicator) -> dict[str, dict[str, Tensor]]:
        found = {}
        for way, options in ways.items():
            model = sharded(models[way][group.rank], process_group(group), policy)
            if options is not None:
                zero3.param_groups(model, lambda name, info, options=options: options | {"lr": float("bias" in name)})
            for step in range(8):
                model(batch(step, group.rank)).float().pow(2).mean().backward()
            with zero3.full_gradients(model) as gradients:
                found[way] = dict(gradients)
        return found

    for found in run_ranks(world_size, body):
        assert all(torch.equal(found[way][name], value) for way in ways for name, value in found["chunk"].items())


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


# -- micro-batches


COMES = (256.0, 1.0, 1.0)  # the gradients of micro-batches: a sum in bf16 stays at 256, and one in fp16 or more is 258
ADDED = [
    (chunk, ShardingPolicy(param_dtype=compute, reduce_dtype=reduce, grad_dtype=keep))
    for chunk, (compute, reduce), keep in product(
        (BF16, FP32), ((None, None), (BF16, None), (BF16, FP32), (None, BF16), (None, torch.float16)), (None, BF16, FP32)
    )
]


class Scaled(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum(-1)


def added_by_hand(chunk: torch.dtype, policy: ShardingPolicy, shards: int, *, as_mean: bool) -> tuple[Tensor, torch.dtype]:
    """The sum, or a running mean, in the dtype of `chunk.grad`, or in that of reductions, if it is wider; and the latter."""
    reduce, keep = policy.reduce_dtype or policy.param_dtype or chunk, policy.grad_dtype or chunk
    wide = torch.float32 if policy.reduce_format is not None and shards > 1 else reduce
    total = torch.zeros((), dtype=wide if wide.itemsize > keep.itemsize else keep)
    for number, each in enumerate(COMES, 1):
        total += (each - total) / number if as_mean else each
    return total.to(keep), reduce


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize(
    ("inside", "fields"),
    [
        ("", {}),
        ("", {"stage": 1}),
        ("", {"stage": 2}),
        ("", {"transactional": True}),
        ("guard", {}),
        ("tokens", {}),
        ("tokens", {"stage": 1}),
        ("no_sync", {}),
        ("no_sync", {"stage": 2}),
        ("no_sync", {"transactional": True}),
        ("no_sync", {"reduce_format": zero3.Int8(block_size=1)}),
        ("no_sync guard", {}),
        ("no_sync tokens", {}),
        ("no_sync tokens", {"transactional": True}),
        ("replicas_only", {}),
        ("replicas_only", {"transactional": True}),
        ("replicas_only", {"reduce_format": zero3.Int8(block_size=1)}),
        ("replicas_only guard", {}),
        ("replicas_only tokens", {}),
    ],
    ids=str,
)
def test_grad_dtype_is_that_in_which_micro_batches_add_up(inside: str, fields: dict[str, Any], shape: tuple[int, int]) -> None:
    check_sums(inside, fields, shape)


@pytest.mark.parametrize(
    ("inside", "fields"), [("no_sync", {}), ("replicas_only", {}), ("replicas_only", {"transactional": True})], ids=str
)
def test_grad_dtype_is_that_in_which_micro_batches_add_up_where_chunks_are_not_cut(inside: str, fields: dict[str, Any]) -> None:
    check_sums(inside, fields, (2, 1))


def check_sums(inside: str, fields: dict[str, Any], shape: tuple[int, int]) -> None:
    """However a micro-batch is kept for a later one, and in whatever dtype it travels."""
    cases = [(chunk, replace(policy, **fields)) for chunk, policy in ADDED]

    def body(mesh: ThreadMesh) -> list[tuple[Tensor, set[torch.dtype]]]:
        found = []
        for chunk, policy in cases:
            layer = zero3.Zero3Layer(Scaled(chunk), policy=policy, process_group=mesh)
            before = len(mesh.row.log)
            for number, gradient in enumerate(COMES):
                with ExitStack() as contexts:
                    if "no_sync" in inside and number < 2:
                        contexts.enter_context(zero3.no_sync(layer))
                    if "replicas_only" in inside and number < 2:
                        contexts.enter_context(zero3.no_sync(layer, replicas_only=True))
                    if "guard" in inside:
                        contexts.enter_context(zero3.step_guard(layer))
                    loss = layer(torch.full((1, WIDTH), gradient, dtype=chunk)).sum()
                    zero3.backward(loss, 1, layer) if "tokens" in inside else loss.backward()
            zero3.clip_grad_norm_(layer, float("inf"))
            sent = {entry.dtype for entry in mesh.row.log[before:] if entry.kind == "reduce_scatter"}
            with zero3.full_gradients(layer) as gradients:
                found.append((gradients["weight"][0].clone(), sent))
        return found

    for found in run_mesh(*shape, body):
        for (value, sent), (chunk, policy) in zip(found, cases, strict=True):
            expected, reduce = added_by_hand(chunk, policy, shape[1], as_mean="tokens" in inside)
            about = 3e-3 if "tokens" in inside or policy.reduce_format else 0  # shares of a mean, and codes of 8 bits, are rounded
            torch.testing.assert_close(value, expected, rtol=about, atol=0, msg=str((chunk, policy)))
            assert sent <= {reduce}
