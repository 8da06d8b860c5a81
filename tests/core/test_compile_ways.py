"""torch.compile of a whole sharded model and of its blocks, before and after sharding: the numbers of eager training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import zero3
from tests.support import processes
from tests.support.reference import Turn
from tests.support.stacks import Block, loss_of, stack

STEPS = 3


def compiled_by_itself(model: Any) -> Any:
    model.compile(backend="aot_eager")
    return model


def with_compiled_blocks(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


WAYS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "torch.compile before": (lambda model: torch.compile(model, backend="aot_eager"), lambda model: model),
    "torch.compile after": (lambda model: model, lambda model: torch.compile(model, backend="aot_eager")),
    "model.compile before": (compiled_by_itself, lambda model: model),
    "model.compile after": (lambda model: model, compiled_by_itself),
    "block.compile before": (with_compiled_blocks, lambda model: model),
    "block.compile after": (lambda model: model, with_compiled_blocks),
}


def trained(model: Any, parameters: Any, ranks: range) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for rank in ranks:
            loss = loss_of(model, Turn(rank, step, 2)) / len(ranks)
            loss.backward()
            losses[-1] += loss.item()
        optimizer.step()
    return losses


def on_a_process(rank: processes.Rank, way: str) -> tuple[list[float], int]:
    from torch._dynamo.utils import counters

    warnings.filterwarnings("ignore", "The .grad attribute")  # dynamo looks, whoever's tensor it is
    torch.compiler.reset()
    before, after = WAYS[way]
    model = after(zero3.shard(before(stack()), Block))
    losses = trained(model, zero3.get_trainable_chunk(model), range(rank.number, rank.number + 1))
    return losses, counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_compile_in_all_ways_trains_as_eager(way: str) -> None:
    """In processes of its own, where nothing has told torch.compile of zero3 before."""
    plain = stack()
    expected = trained(plain, plain.parameters(), range(2))
    results = processes.on_ranks(2, on_a_process, way, fresh=True, group_timeout=200, join_timeout=250)
    for step in range(STEPS):
        assert sum(losses[step] for losses, _ in results) / 2 == pytest.approx(expected[step], abs=1e-10)
    assert all(graphs > 0 for _, graphs in results), "something was compiled"


def test_compile_of_a_fullgraph_is_an_error_that_says_what_to_compile_when() -> None:
    model = zero3.shard(stack())
    for module in (model, model.blocks[0]):
        with pytest.raises(RuntimeError, match=r"block\.compile\(fullgraph=True\), then zero3\.shard"):
            module.compile(fullgraph=True)
