"""Activation checkpoints around layers that not every rank calls."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.towers import PREPARED, TOWERS, Block, TowersLife, batch, check_life, seeing

HIDDEN = 4
STEPS: list[list[tuple[int, ...]]] = [[(0,), (1, 0)], [(), (1,)], [(0, 1), (1,)], [(), ()], [(1, 1), ()]]  # [step][rank]: the experts


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.experts = nn.Linear(HIDDEN, HIDDEN), nn.ModuleList(Expert() for _ in range(2))

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        y = torch.tanh(self.linear(x))
        for number in chosen:
            y = y + x.sum() * self.experts[number](y)
        return y


class Model(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks, self.head, self.how = nn.ModuleList(Routed() for _ in range(4)), nn.Linear(HIDDEN, 2), how

    def pair(self, first: int, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        return self.blocks[first + 1](self.blocks[first](x, chosen), chosen)

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        reentrant = "reentrant" in self.how
        for first in (0, 2):
            if "pairs" in self.how:
                x = checkpoint(self.pair, first, x, chosen, use_reentrant=reentrant)
                continue
            for block in self.blocks[first : first + 2]:
                x = checkpoint(block, x, chosen, use_reentrant=reentrant)
        return self.head(x)


def data(rank: int) -> Tensor:
    return torch.randn(3, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).requires_grad_()


def check_training(plain: Any, sharded: Callable[[Any, ThreadCommunicator], object], steps: list[list[tuple[int, ...]]]) -> None:
    """Two ranks train as one process does. `steps`: by step and rank, the second argument of a forward."""
    models = [copy.deepcopy(plain) for _ in range(2)]

    def body(group: ThreadCommunicator) -> dict[str, Any]:
        model = models[group.rank]
        sharded(model, group)
        optimizer = torch.optim.SGD(zero3.get_trainable_chunk(model), 0.1)
        for chosen in steps:
            model(data(group.rank), chosen[group.rank]).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in zero3.full_state_dict(model, rank0_only=False).items()}

    found = run_ranks(2, body, 20)
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for chosen in steps:
        for rank in range(2):
            (plain(data(rank), chosen[rank]).square().sum() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for each in found:
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(each[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["", "reentrant", "pairs", "reentrant pairs"])
def test_experts_in_blocks_that_are_checkpointed_train_as_one_process(how: str) -> None:
    torch.manual_seed(0)
    check_training(
        Model(how).double(), lambda model, group: zero3.shard(model, [Routed, Expert], optional=Expert, process_group=group), STEPS
    )


class Optional(nn.Module):
    """Blocks in checkpoints, so many in each; the second and the fourth are called or not. What follows a block saves tensors, too."""

    def __init__(self, reentrant: bool, together: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Expert(), Expert()) for _ in range(5))
        self.head, self.reentrant, self.together = nn.Linear(HIDDEN, 2), reentrant, together
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def run(self, first: int, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        for number, block in list(enumerate(self.blocks))[first : first + self.together]:
            if number in (0, 2, 4) or number // 2 in chosen:
                x = block(x)
        return x * self.scale

    def forward(self, x: Tensor, chosen: tuple[int, ...]) -> Tensor:
        for first in range(0, len(self.blocks), self.together):
            x = checkpoint(self.run, first, x, chosen, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_checkpoints_around_what_is_called_or_not_train_as_one_process(reentrant: bool, together: int, depth: int) -> None:
    """A gate stands before a block's call, and so in its checkpoint; the other rank calls the tower in one of its own. A recomputation may
    begin before a gradient has come to the layer, on some ranks alone."""
    torch.manual_seed(0)
    policy = zero3.ShardingPolicy(prefetch_depth=depth)
    for layers in (Expert, nn.Sequential):
        check_training(
            Optional(reentrant, together).double(),
            lambda model, group: zero3.shard(model, layers, optional=["blocks.1", "blocks.3"], policy=policy, process_group=group),  # noqa: B023
            STEPS,
        )


@pytest.mark.parametrize("prepared", [name for name in PREPARED if "checkpoint around" in name])
def test_ranks_in_a_checkpoint_take_part_in_calls_that_are_outside_of_it(prepared: str) -> None:
    """Between what one rank calls in a checkpoint, another calls what it alone has; and steps in which nobody calls a tower."""
    a, v = ("audio",), ("vision",)
    check_life(
        TowersLife([[[a + a + v + v, v + a + a + v]], [[v + a + v, a + v + a]], [[a + a + a, v + a + a + v]]], prepare=PREPARED[prepared])
    )
    check_life(TowersLife([[[a + a, v + a, ()]], [[v + a + v, (), a]], [[(), (), ()]], [[a + v, v, v + v]]], prepare=PREPARED[prepared]))


def test_a_deleted_model_of_layers_that_one_checkpoint_recomputes_leaves_nothing() -> None:
    """The calls of one checkpoint are known to each other, and hold their layers."""

    def body(group: ThreadCommunicator) -> list[bool]:
        model = zero3.shard(Model("pairs").double(), [Routed, Expert], optional=Expert, process_group=group)
        model(data(group.rank), (group.rank,)).square().sum().backward()
        layers = [weakref.ref(module) for module in model.modules() if isinstance(module, zero3.Zero3Layer)]
        del model
        return [layer() is None for layer in layers]

    gc.collect()
    gc.disable()
    try:
        assert all(gone and all(gone) for gone in run_ranks(2, body, 20))
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_teacher_with_towers_in_a_checkpoint_of_its_student(reentrant: bool) -> None:
    """It runs without graph, and again in backward."""
    life = TowersLife([[[("vision",), ()]], [[(), ("audio",)]], [[("audio", "vision"), ("vision",)]]])
    teacher, student = seeing(), nn.Linear(3, 3).double()

    def gradient(teacher: nn.Module, rank: int) -> Tensor | None:
        learns = copy.deepcopy(student)
        for step in range(len(life.calls)):
            x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
            lesson = partial(taught, teacher, learns, batch(life, step, 0, rank))
            checkpoint(lesson, x, use_reentrant=reentrant).sum().backward()
        return learns.weight.grad

    def taught(teacher: nn.Module, learns: nn.Module, given: Any, x: Tensor) -> Any:
        with torch.no_grad():
            target = teacher(*given)
        return learns(x) * target.sum()

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(copy.deepcopy(teacher), [Block, nn.Embedding], optional=TOWERS, process_group=group)
        torch.testing.assert_close(gradient(model, group.rank), expected[group.rank], rtol=0, atol=1e-12)

    expected = [gradient(teacher, rank) for rank in range(2)]
    run_ranks(2, body)
