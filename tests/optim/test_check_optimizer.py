"""check_optimizer: groups that a filter by names left empty, and optimizers that take all ranks' parameters to be equal."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn, optim

import zero3
from tests.optim.test_optimizer_use import Net, net
from tests.support.processes import Rank, on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of its imports
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

Filter = Callable[[str, nn.Parameter], bool]
FILTERS: dict[str, Filter] = {
    "bias": lambda name, parameter: "bias" in name,
    "norm": lambda name, parameter: "norm.weight" in name,
    "matrices": lambda name, parameter: parameter.ndim >= 2,
    "not the vectors": lambda name, parameter: parameter.ndim != 1,
}


def grouped(model: nn.Module, picked: Filter) -> list[dict[str, Any]]:
    """As scripts make them for unsharded models."""
    found = [p for name, p in model.named_parameters() if picked(name, p)]
    others = [p for name, p in model.named_parameters() if not picked(name, p)]
    return [{"params": found, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.5}]


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_by_names_of_named_parameters_are_refused_where_one_is_empty(name: str, world_size: int) -> None:
    plain = grouped(net(), FILTERS[name])
    assert all(group["params"] for group in plain), "on the unsharded model the filter finds something, and leaves something"

    def body(group: ThreadCommunicator) -> str:
        model = zero3.shard(models[group.rank], process_group=group if world_size > 1 else None)
        optimizer = optim.AdamW(grouped(model, FILTERS[name]))
        with pytest.raises(ValueError, match=r"group 0 of the AdamW \(weight_decay=0\.0\) is empty.*zero3\.param_groups") as told:
            zero3.check_optimizer(model, optimizer)
        return str(told.value)

    models = [net() for _ in range(world_size)]
    found = run_ranks(world_size, body)
    assert found == [found[0]] * world_size
    assert (
        "blocks.0.trainable_chunk" in found[0] and "8 parameters (blocks.0.weight, blocks.0.bias, blocks.1.weight and 5 more)" in found[0]
    )


def test_groups_by_names_of_layers_are_right() -> None:
    """A name that stands for whole layers finds their chunks."""

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        zero3.check_optimizer(model, optim.AdamW(grouped(model, lambda name, _: "blocks.0" in name)))

    models = [net() for _ in range(2)]
    run_ranks(2, body)


def test_groups_that_param_groups_leaves_empty_on_a_rank_are_right() -> None:
    """One bias of five elements has a group to itself: most ranks hold nothing of it."""

    def body(group: ThreadCommunicator) -> int:
        model = zero3.shard(models[group.rank], process_group=group)
        groups = zero3.param_groups(model, lambda name, info: {"weight_decay": 0.0 if name == "blocks.0.bias" else 0.5})
        zero3.check_optimizer(model, optim.AdamW(groups))
        return sum(p.numel() for p in groups[1]["params"])

    models = [net() for _ in range(4)]
    held = run_ranks(4, body)
    assert sum(held) == 5 and held.count(0) >= 2


def test_an_empty_group_on_one_rank_alone_is_told_to_all() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        chunks = zero3.get_trainable_chunk(model)
        groups = [{"params": []}, {"params": chunks}] if group.rank == 1 else [{"params": chunks[:1]}, {"params": chunks[1:]}]
        with pytest.raises(ValueError, match=r"^rank 1: group 0 of the SGD \(no options of its own\) is empty"):
            zero3.check_optimizer(model, optim.SGD(groups, lr=0.1))

    models = [net() for _ in range(2)]
    run_ranks(2, body)


def of_equal_parameters(rank: Rank) -> list[str]:
    model: Net = zero3.shard(net())
    chunks = zero3.get_trainable_chunk(model)
    averager = type("Averager", (), {"step": 0})()
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = [ZeroRedundancyOptimizer(chunks, optim.SGD, lr=0.1), PostLocalSGDOptimizer(optim.SGD(chunks, lr=0.1), averager)]
    for optimizer in made:
        try:
            zero3.check_optimizer(model, optimizer)
        except ValueError as error:
            told.append(str(error))
    return told


def test_torchs_zero_redundancy_optimizer_and_local_sgd_over_chunks_are_refused() -> None:
    for told in on_ranks(2, of_equal_parameters, debug="OFF"):
        for text, name in zip(told, ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"), strict=True):
            assert text.startswith(f"rank 0: a {name} takes the parameters of all ranks to be equal") and "plain torch.optim" in text


@pytest.mark.parametrize("world_size", [1, 2])
def test_our_zero_redundancy_optimizer_takes_no_chunks(world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group if world_size > 1 else None)
        chunks = zero3.get_trainable_chunk(model)
        before = [chunk.detach().clone() for chunk in chunks]
        for params in (
            chunks,
            [{"params": chunks[:1]}, {"params": chunks[1:]}],
            [{"params": chunks[0]}],
            {id(c): c for c in chunks}.values(),
        ):
            with pytest.raises(
                ValueError, match=r"belongs to a sharded model.*Give zero3\.get_trainable_chunk\(model\) to the plain optimizer"
            ):
                zero3.ZeroRedundancyOptimizer(params, optim.SGD, group if world_size > 1 else None, lr=0.1)
        assert all(torch.equal(a, b) for a, b in zip(before, chunks, strict=True))

    models = [net() for _ in range(world_size)]
    run_ranks(world_size, body)


class IgnoresClosure(optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step()


class Halving(IgnoresClosure):
    """The gradient's norm of a slice is not that of a parameter."""

    def step(self, closure: Any = None) -> None:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None):
            parameter.grad = parameter.grad / parameter.grad.norm()
        super().step()


def test_check_optimizer_tries_out_a_step_that_ignores_its_closure() -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group)
        chunks = zero3.get_trainable_chunk(model)
        zero3.check_optimizer(model, IgnoresClosure(chunks, lr=0.1))
        with pytest.raises(ValueError, match=r"Halving .* does more than treat each element by itself"):
            zero3.check_optimizer(model, Halving(chunks, lr=0.1))

    models = [net() for _ in range(2)]
    run_ranks(2, body)


class Blockwise(optim.SGD):
    """Divides each gradient by the largest of its block, in tensors that are long enough: as 8-bit state is kept in blocks.

    What it was made with is in no group: all of it is in attributes, or in an object that is one.
    """

    def __init__(self, params: Any, lr: float = 0.1, block: int = 0, least: int = 4096, table: Any = None, *, hidden: int = 0) -> None:
        super().__init__(params, lr)
        self.block, self._of = block, hidden
        self.args = SimpleNamespace(least=least, inner=SimpleNamespace(block=0))
        self.table = table
        self.ready, self.steps = False, 0
        self.numel = sum(parameter.numel() for group in self.param_groups for parameter in group["params"])

    def step(self, closure: Any = None) -> None:
        if not self.ready:
            self.scale, self.ready = torch.full((1,), 0.5), True
        self.steps += 1
        assert self.numel == sum(parameter.numel() for group in self.param_groups for parameter in group["params"])
        block = self.block or self._of or self.args.inner.block or (0 if self.table is None else int(self.table[0]))
        for parameter in (parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None):
            if block and parameter.numel() >= self.args.least:
                blocks = parameter.grad.flatten().split(block)
                parameter.grad = torch.cat([each / each.abs().max() for each in blocks]).view_as(parameter)
            parameter.grad = parameter.grad * self.scale
        super().step()


class Demanding(Blockwise):
    def __init__(self, params: Any, lr: float, *, block: int) -> None:
        super().__init__(params, lr, block)


def changed_later(chunks: Any) -> Blockwise:
    optimizer = Blockwise(chunks)
    optimizer.args.inner.block = 256
    return optimizer


# with what the error says to give it
MADE_WITH: dict[str, tuple[Callable[[Any], Blockwise], str]] = {
    "an argument": (lambda chunks: Blockwise(chunks, block=256), '"align": 256'),
    "an argument that must be given": (lambda chunks: Demanding(chunks, lr=0.1, block=256), '"align": 256'),
    "an argument under another name": (lambda chunks: Blockwise(chunks, hidden=256), '"align": 256'),
    "an argument that is a tensor": (lambda chunks: Blockwise(chunks, table=torch.tensor([256, 1])), '"align": 256'),
    "an object's attribute": (changed_later, '"align": 256'),
    "long tensors alone": (lambda chunks: Blockwise(chunks, block=256, least=50_000), '"align": 4096'),
    "long blocks": (lambda chunks: Blockwise(chunks, block=9_000), '"whole": True'),
}


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", MADE_WITH)
def test_check_optimizer_tries_the_optimizer_as_it_was_made(name: str, world_size: int) -> None:
    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group if world_size > 1 else None)
        chunks = zero3.get_trainable_chunk(model)
        used = Blockwise(chunks, block=0)
        for _ in range(2):
            zero3.check_optimizer(model, used)
            for chunk in chunks:
                chunk.grad = torch.zeros_like(chunk)
            used.step()  # what steps change (`ready`, `steps`) and what is about its parameters (`numel`) is not what it was made with
        make, remedy = MADE_WITH[name]
        with pytest.raises(ValueError, match=r"does more than treat each element by itself") as error:
            zero3.check_optimizer(model, make(chunks))
        assert str(error.value).endswith(f"zero3.param_groups(model, lambda name, info: {{{remedy}}})")

    models = [net() for _ in range(world_size)]
    run_ranks(world_size, body)


# -- a step in which no gradient reaches a parameter


class Decaying(optim.Optimizer):
    """Without a gradient a parameter decays all the same, or is an error."""

    def __init__(self, parameters: Any, strict: bool = False) -> None:
        super().__init__(parameters, {"strict": strict})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None and group["strict"]:
                    raise KeyError("every parameter needs a gradient")
                p.mul_(0.9).sub_(0 if p.grad is None else 0.1 * p.grad)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_optimizer_that_changes_what_no_gradient_reached_is_refused(world_size: int, strict: bool) -> None:
    """One that needs every gradient raises on an unsharded model, too: it is as there."""
    models = [net() for _ in range(world_size)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(models[group.rank], process_group=group if world_size > 1 else None)
        optimizer = Decaying(zero3.get_trainable_chunk(model), strict)
        said = "Decaying.* does more than treat each element by itself.* a step differs in which no gradient reaches one of the parameters"
        with nullcontext() if strict else pytest.raises(ValueError, match=said):
            zero3.check_optimizer(model, optimizer)

    run_ranks(world_size, body)
