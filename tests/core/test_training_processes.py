"""Training by real processes equals training by plain torch, by DDP and by FSDP2 on the whole batch."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import linear
from torch.nn.parallel import DistributedDataParallel

import zero3
from tests.support.fsdp2 import whole
from tests.support.models import Checkpointed
from tests.support.processes import Rank, on_ranks
from tests.support.training import (
    ADAMW,
    SGD,
    Optimizer,
    Run,
    assert_same_bits,
    difference,
    difference_by_tensor,
    joined,
    loss_of,
    odd_model,
    sentences,
    train_plain,
    train_sharded,
)

optimizers = pytest.mark.parametrize("optimizer", [SGD, ADAMW], ids=["sgd", "adamw"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def assert_equal_runs(found: Run, expected: Run, dtype: torch.dtype) -> None:
    assert len(found.losses) == 10
    assert found.losses[-1] < found.losses[0], "nothing was learned: the comparison would mean little"
    if dtype == torch.float64:
        assert difference_by_tensor(found, expected) <= 1e-12
    assert difference(found, expected) <= {torch.float32: 1e-6, torch.float64: 1e-12}[dtype]


def sharded(modules: list[nn.Module], policy: zero3.ShardingPolicy = zero3.ShardingPolicy()) -> zero3.Zero3Sequential:
    return zero3.Zero3Sequential([zero3.Zero3Layer(module, policy=policy) for module in modules])


def train(rank: Rank, dtype: torch.dtype, optimizer: Optimizer, prefetch_depth: int = 1, gain: tuple[int, ...] = ()) -> Run:
    # rank 0's values win: the others start from values of their own
    model = sharded(odd_model(dtype, seed=rank.number, gain=gain), zero3.ShardingPolicy(prefetch_depth=prefetch_depth))
    return train_sharded(model, optimizer, rank.number, rank.world_size)


@optimizers
@dtypes
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ten_steps_equal_plain_torch(world_size: int, dtype: torch.dtype, optimizer: Optimizer) -> None:
    found = joined(on_ranks(world_size, train, dtype, optimizer))
    assert_equal_runs(found, train_plain(odd_model(dtype), optimizer), dtype)


def train_both_ways(rank: Rank, dtype: torch.dtype, optimizer: Optimizer) -> tuple[Run, Run]:
    # in one process, since bits depend on its number of threads
    return train(rank, dtype, optimizer), train_plain(odd_model(dtype), optimizer)


@optimizers
@dtypes
@pytest.mark.parametrize("process_group", [False, True], ids=["alone", "group of one"])
def test_one_rank_gives_the_bits_of_plain_torch(process_group: bool, dtype: torch.dtype, optimizer: Optimizer) -> None:
    ((found, expected),) = on_ranks(1, train_both_ways, dtype, optimizer, process_group=process_group)
    assert_same_bits(joined([found]), expected)


@functools.cache
def two_ranks(optimizer_kind: str, prefetch_depth: int, repetition: int = 0) -> Run:
    optimizer = {"SGD": SGD, "AdamW": ADAMW}[optimizer_kind]
    return joined(on_ranks(2, train, torch.float32, optimizer, prefetch_depth))


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_two_runs_give_the_same_bits(kind: str) -> None:
    assert_same_bits(two_ranks(kind, 1, repetition=1), two_ranks(kind, 1))


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("prefetch_depth", [0, 2, 3])
def test_bits_do_not_depend_on_prefetch_depth(prefetch_depth: int, kind: str) -> None:
    assert_same_bits(two_ranks(kind, prefetch_depth), two_ranks(kind, 1))


# -- other libraries' ways of training the same model: FSDP2 has no 0-dim parameters, so the gains have one element


def train_fsdp2(rank: Rank, dtype: torch.dtype) -> Run:
    mesh = init_device_mesh("cpu", (rank.world_size,))
    model, run = nn.Sequential(*odd_model(dtype, gain=(1,))), Run()
    for module in model:
        fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = SGD.build(model.parameters())
    warnings.simplefilter("ignore")  # FSDP2 warns of views that are modified in place: none is here
    for step in range(10):
        loss = loss_of(model, sentences(step)[rank.number :: rank.world_size])
        loss.backward()
        run.losses.append(loss.item())
        run.gradients.append({name: whole(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {name: whole(p) for name, p in model.named_parameters()}
    return run


def train_ddp(rank: Rank, dtype: torch.dtype) -> Run:
    inner = nn.Sequential(*odd_model(dtype, gain=(1,)))
    model, run = DistributedDataParallel(inner), Run()
    optimizer = SGD.build(model.parameters())
    for step in range(10):
        loss = loss_of(model, sentences(step)[rank.number :: rank.world_size])
        loss.backward()
        run.losses.append(loss.item())
        run.gradients.append({name: p.grad.clone() for name, p in inner.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {name: p.detach().clone() for name, p in inner.named_parameters()}
    return run


@dtypes
@pytest.mark.parametrize("reference", [train_fsdp2, train_ddp], ids=["fsdp2", "ddp"])
def test_ten_steps_equal_those_of_other_libraries(reference: object, dtype: torch.dtype) -> None:
    # DDP dies in torch's DETAIL debug mode on gloo, hence OFF
    theirs = on_ranks(2, reference, dtype, debug="OFF")
    losses = [sum(losses) / 2 for losses in zip(*(run.losses for run in theirs), strict=True)]
    expected = Run(losses, theirs[0].gradients, theirs[0].parameters)
    assert_equal_runs(joined(on_ranks(2, train, dtype, SGD, 1, (1,))), expected, dtype)


# -- the same on paths that move transfers about


def train_checkpointed(rank: Rank, use_reentrant: bool, around: bool) -> Run:
    embedding, *blocks, readout = odd_model(torch.float64, seed=rank.number)
    if around:
        layers = [Checkpointed(zero3.Zero3Layer(block), use_reentrant) for block in blocks]
    else:
        layers = [zero3.Zero3Layer(Checkpointed(block, use_reentrant)) for block in blocks]
    model = nn.Sequential(zero3.Zero3Layer(embedding), *layers, zero3.Zero3Layer(readout))
    return train_sharded(model, SGD, rank.number, rank.world_size)


@pytest.mark.parametrize("around", [True, False], ids=["around layers", "inside layers"])
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing_changes_nothing(use_reentrant: bool, around: bool) -> None:
    found = joined(on_ranks(2, train_checkpointed, use_reentrant, around))
    for tensors in (*found.gradients, found.parameters):
        for name in list(tensors):
            tensors[name.replace("module.", "")] = tensors.pop(name)
    assert_equal_runs(found, train_plain(odd_model(torch.float64), SGD), torch.float64)


class Adapted(nn.Module):
    """A frozen projection kept in bf16 with a trainable fp32 correction beside it. Computes in fp32: bf16 is too coarse to compare."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.to(torch.bfloat16).requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.base.weight.to(x.dtype), self.base.bias.to(x.dtype)) + self.up(self.down(x))


def adapted_model(seed: int) -> list[nn.Module]:
    modules = odd_model(seed=seed)
    torch.manual_seed(seed)
    for block in modules[1:4]:
        block.up = Adapted(block.up)
        block.norm.requires_grad_(False)
    return modules


def train_adapted(rank: Rank) -> tuple[Run, list[list[torch.dtype]]]:
    model = sharded(adapted_model(rank.number))
    return train_sharded(model, SGD, rank.number, rank.world_size), [[p.dtype for p in layer.parameters()] for layer in model]


@pytest.mark.parametrize("world_size", [2, 3])
def test_frozen_bf16_under_trainable_fp32(world_size: int) -> None:
    results = on_ranks(world_size, train_adapted)
    found, expected = joined([run for run, _ in results]), train_plain(adapted_model(0), SGD)
    assert sorted(map(str, results[0][1][1])) == ["torch.bfloat16", "torch.float32", "torch.float32"]  # a chunk per (trainable, dtype)
    for name, value in expected.parameters.items():
        assert found.parameters[name].dtype == value.dtype
        if ".base." in name:
            assert torch.equal(found.parameters[name], value), "a frozen parameter changed"
    assert_equal_runs(found, expected, torch.float32)


def buffers_of(rank: Rank) -> list[list[complex]]:
    conjugate = (torch.tensor([1 + 2j, 3 - 4j]) * (rank.number + 1)).conj()
    model = nn.Sequential(nn.Linear(2, 2))
    for name, view in (("conjugate", conjugate), ("imaginary", conjugate.imag)):
        model.register_buffer(name, view)
    return [buffer.tolist() for buffer in zero3.shard(model, nn.Linear).buffers()]


def test_buffers_that_stand_for_other_numbers_than_their_memory_are_rank_0s() -> None:
    assert on_ranks(2, buffers_of) == [[[1 - 2j, 3 + 4j], [-2.0, 4.0]]] * 2
