"""A model of which some parameters are reached in some steps by some ranks, and what plain torch makes of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import zero3
from tests.support.ranks import run_mesh, run_ranks
from tests.support.reference import assert_close
from zero3 import Int8, ShardingPolicy

WIDTH, STEPS = 4, 4
Use = Callable[[int, int, int, int], set[str]]  # block, step, rank and number of ranks -> what of the block computes


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH + 1)
        self.use: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.a(x)) if "a" in self.use else x * 1
        return y + torch.tanh(self.b(x))[..., :WIDTH] if "b" in self.use else y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.tell: Any = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def seldom(block: int, step: int, rank: int, ranks: int) -> set[str]:
    """Chunks can follow it: a chunk's parameters are reached in the same steps, or never."""
    if block == 0:
        return {"a"}  # b: never, on any rank
    if block == 1:
        return {"a", "b"} if step % 2 else set()
    return {"a", "b"} if rank == ranks - 1 or block == 3 else {"a"}  # b of block 2: the last rank alone


def changing(block: int, step: int, rank: int, ranks: int) -> set[str]:
    """b of the last block in some steps only: that is a count of steps of its own."""
    return {"a", "b"} if block == 3 and step in (1, 3) else {"a"} if block == 3 else seldom(block, step, rank, ranks)


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(3, WIDTH, dtype=torch.float64, generator=generator)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.3)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.3)


Make = Callable[[Any], torch.optim.Optimizer]


def loss_of(model: Any, modules: list[Any], use: Use, place: tuple[int, int, int, int]) -> Tensor:
    step, micro, rank, ranks = place
    for number, block in enumerate(modules):
        block.use = use(number, step, rank, ranks)
    loss: Tensor = model(batch(step, micro, rank)).pow(2).sum()
    return loss


class Plain:
    """All ranks in one process. `nothing`: the names without a gradient before each step."""

    def __init__(self, ranks: int, use: Use, make: Make, micros: int = 1) -> None:
        self.model, self.nothing, self.norms = net(), [], []
        self.optimizer = make(self.model.parameters())
        for step in range(STEPS):
            for micro in range(micros):
                for rank in range(ranks):
                    (loss_of(self.model, list(self.model.blocks), use, (step, micro, rank, ranks)) / ranks).backward()
            self.nothing.append({name for name, p in self.model.named_parameters() if p.grad is None})
            self.norms.append({name: p.grad.norm() for name, p in self.model.named_parameters() if p.grad is not None})
            self.optimizer.step()
            self.optimizer.zero_grad()


def chunks_of(model: Any) -> Any:
    return zero3.get_trainable_chunk(model)


def apart(model: Any) -> Any:
    return zero3.param_groups(model, lambda name, info: {"align": 2})


def by_name(model: Any) -> Any:
    return zero3.param_groups(model, lambda name, info: {"name": name})


def whole(model: Any) -> Any:
    return zero3.param_groups(model, lambda name, info: {"whole": True})


def train(group: Any, model: Any, use: Use, given: tuple[Any, Make], micros: int, around: Any) -> tuple[list[set[str]], Any, Any]:
    """Returns the names without a gradient before each step, the model and the optimizer."""
    modules = list(model.blocks)
    zero3.shard(model, Block, process_group=group[0], policy=group[1])
    optimizer = given[1](given[0](model))
    nothing = []
    names = {name for name, _ in net().named_parameters()}
    for step in range(STEPS):
        for micro in range(micros):
            with around(model, micro == micros - 1):
                loss_of(model, modules, use, (step, micro, group[2], group[3])).backward()
        norms = zero3.parameter_norms(model)
        nothing.append(names - zero3.named_gradients(model).keys())
        assert all(not norms[name] for name in nothing[-1]) and norms.keys() == names
        with zero3.full_gradients(model) as gradients:
            assert names - gradients.keys() == nothing[-1]
        optimizer.step()
        optimizer.zero_grad()
    return nothing, model, optimizer


def alone(model: Any, last: bool) -> AbstractContextManager[Any]:
    return nullcontext()


def kept(model: Any, last: bool) -> AbstractContextManager[Any]:
    return nullcontext() if last else zero3.no_sync(model)


def in_replicas(model: Any, last: bool) -> AbstractContextManager[Any]:
    return nullcontext() if last else zero3.no_sync(model, replicas_only=True)


def guarded(model: Any, last: bool) -> AbstractContextManager[Any]:
    return zero3.step_guard(model)


def compare(
    world: tuple[int, int],
    policy: ShardingPolicy,
    use: Use,
    given: tuple[Any, Make],
    micros: int = 1,
    around: Any = alone,
    kind: Any = None,
) -> None:
    replicas, shards = world
    ranks = max(1, replicas) * shards
    plain = Plain(ranks, use, given[1], micros)
    models = [net() for _ in range(ranks)]

    def body(group: Any) -> Any:
        nothing, model, _ = train((group, policy, group.rank, ranks), models[group.rank], use, given, micros, around)
        return nothing, zero3.full_state_dict(model, rank0_only=False)

    found = run_mesh(replicas, shards, body, kind=kind) if replicas else run_ranks(shards, body, kind=kind)
    for nothing, values in found:
        assert nothing == plain.nothing
        assert_close(values, plain.model.state_dict(), 1e-9, "parameters")


POLICIES: dict[str, dict[str, Any]] = {
    "stage 3": {}, "stage 2": {"stage": 2}, "stage 1": {"stage": 1}, "transactional": {"transactional": True}, "dynamic": {"dynamic": True},
    "no prefetch": {"prefetch_depth": 0}, "reduce_format": {"reduce_format": Int8(block_size=1)}, "sum": {},
}  # fmt: skip
