"""Deleting a model frees what it held at once, not when the cycle collector happens to run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3 import Zero3Layer, Zero3Sequential, full_params, shard


@pytest.fixture(autouse=True)
def without_cycle_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def watched(model: nn.Module) -> list[weakref.ref[object]]:
    layers = [module for module in model.modules() if isinstance(module, Zero3Layer)]
    states = [layer._state for layer in layers]
    parameters = [sharded.sites.parameter for state in states for sharded in state.parameters]
    chunks = [chunk for state in states for chunk in state.chunks]
    return [weakref.ref(each) for each in (*layers, *states, *parameters, *chunks, *(chunk.full.tensor for chunk in chunks))]


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@pytest.mark.parametrize("kind", ["sequential", "sharded"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_deleted_model_leaves_nothing(kind: str, world_size: int) -> None:
    def body(communicator: ThreadCommunicator) -> list[bool]:
        if kind == "sequential":
            model: nn.Module = Zero3Sequential([Zero3Layer(nn.Linear(4, 4), process_group=communicator) for _ in range(2)])
        else:
            model = shard(Stack(), process_group=communicator)
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 4))
        with full_params(model):
            pass
        references = watched(model)
        del model
        return [reference() is None for reference in references]

    for gone in run_ranks(world_size, body):
        assert all(gone)


def test_what_counts_live_memory_may_ask_a_released_parameter_for_its_storage() -> None:
    def body(communicator: ThreadCommunicator) -> int:
        layer = Zero3Layer(nn.Linear(64, 64), process_group=communicator)
        return layer.module.weight.untyped_storage().nbytes()

    assert run_ranks(2, body) == [4, 4]  # one NaN, stretched to the parameter's shape
