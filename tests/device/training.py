"""What the simulated device trains: a rank's place, small models, a loop. Kernels whose numbers depend on the device are avoided."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.models import ONE_GENERATOR
from zero3 import ShardingPolicy

# With these sizes a chunk of a block is as large as its output, and its full buffer as its activations: they take each other's memory.
WIDTH, ROWS = 16, 34


@dataclass
class Me:
    """A rank: its device, its group (None: torch.distributed's default group), and a directory that all ranks share."""

    rank: int
    world_size: int
    device: torch.device
    group: Any
    directory: Path
    offload: Any = None  # the policy's

    def tensor(self, step: int, *shape: int) -> Tensor:
        """Its copy to the device goes on beside the host, as that of a loader with `pin_memory=True`."""
        made = torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + self.rank))
        return made if self.device.type == "cpu" else made.pin_memory().to(self.device, non_blocking=True)


def scratch() -> Path:
    return Path(tempfile.mkdtemp(prefix="device-"))


class Norm(nn.Module):
    """With statistics in fp32, as CUDA's layer norm keeps them under bf16 too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * x.float().pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()).to(x.dtype) * self.weight


class Block(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.norm, self.up, self.down = Norm(), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.reentrant = reentrant

    def compute(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x) if self.reentrant is None else checkpoint(self.compute, x, use_reentrant=self.reentrant)


class Caching(Block):
    """Keeps a view of a parameter, as caches do."""

    def compute(self, x: Tensor) -> Tensor:
        self.cache = self.down.weight.detach()[:2]
        return super().compute(x)


class Adapted(nn.Module):
    """A frozen linear layer in bf16 with a low-rank addition in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).bfloat16().requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x.bfloat16()).float() + self.b(self.a(x)))


class Turning(nn.Module):
    """A complex parameter, of an odd number of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.turn = nn.Parameter(torch.randn(7, dtype=torch.complex64))
        self.down = nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.view_as_real(self.up(x) * self.turn).sum(-1))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 3
        self.up, self.down = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4), nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor, which: Tensor, how_much: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            row, place = (which == expert).nonzero(as_tuple=True)
            made = nn.functional.gelu(x[row] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, row, made * how_much[row, place, None])
        return out


class Mixed(Block):
    """Where a row goes depends on its place."""

    def __init__(self, reentrant: bool | None = None, *, trains: bool = True) -> None:
        super().__init__(reentrant)
        self.router, self.experts = nn.Linear(WIDTH, 3), Experts().requires_grad_(trains)

    def compute(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        place = torch.arange(len(x), device=x.device)
        which = torch.stack([place % 3, place * place % 3], 1)  # some have one expert twice
        return x + self.experts(hidden, which, self.router(hidden).sigmoid().gather(1, which))


class Stack(nn.Module):
    """Layers for `shard`, with parameters that are left to the root. `skip`: the blocks that this rank leaves out."""

    def __init__(self, make: Callable[[], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.skip: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x) if number not in self.skip else x
        return x


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with ONE_GENERATOR:
        torch.manual_seed(seed)
        return make()


def sharded(me: Me, make: Callable[[], nn.Module] = Stack, seed: int = 0, **policy: Any) -> nn.Module:
    policy = {"offload": me.offload, **policy}
    return zero3.shard(built(make, seed), device=me.device, process_group=me.group, policy=ShardingPolicy(**policy))


def in_sequence(me: Me, **policy: Any) -> zero3.Zero3Sequential:
    blocks = [built(Block, number) for number in range(4)]
    choice = ShardingPolicy(offload=me.offload, **policy)
    made = [zero3.Zero3Layer(b, device=me.device, process_group=me.group, policy=choice) for b in blocks]
    return zero3.Zero3Sequential(made)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1, momentum=0.9, foreach=True)


def loss_of(model: nn.Module, me: Me, step: int) -> Tensor:
    return model(me.tensor(step, ROWS, WIDTH)).float().pow(2).mean()


def update(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module, me: Me, steps: int = 3, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    optimizer = optimizer or sgd(model)
    losses = []
    for step in range(steps):
        loss = loss_of(model, me, step)
        loss.backward()
        norm = zero3.clip_grad_norm_(model, 1.0)
        update(optimizer)
        losses += [loss.detach(), norm]
    return [*losses, *values(model)]


def micro_batches(model: nn.Module, me: Me, contexts: list[Callable[[], AbstractContextManager[Any]]]) -> list[Tensor]:
    """Two steps. Each micro-batch runs in a context of its own."""
    optimizer = sgd(model)
    for step in range(2):
        for micro, context in enumerate(contexts):
            with context():
                loss_of(model, me, 10 * step + micro).backward()
        update(optimizer)
    return values(model)


def fails(*_: Any) -> None:
    raise ArithmeticError("as told")


def values(model: nn.Module) -> list[Tensor]:
    return list(zero3.full_state_dict(model, rank0_only=False).values())
