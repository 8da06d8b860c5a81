"""Chunks in files are shared with forked children, where plain torch's would be copies: a child that uses them is told so."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.models import linear, rows, seeded
from tests.support.processes import Rank, in_child, on_ranks
from zero3 import ShardingPolicy


def _forward(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with torch.no_grad():
        model(rows(2))


def _step(model: nn.Module, optimizer: Any, folder: Path) -> None:
    optimizer.step()  # of the gradients that the parent had


def _step_of_torch(model: nn.Module, optimizer: Any, folder: Path) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def _step_by_turns(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zero3.offload_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def _by_hand(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with torch.no_grad():
        next(model.parameters()).zero_()


def _as_data(model: nn.Module, optimizer: Any, folder: Path) -> None:
    next(model.parameters()).data.zero_()


def _many(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with torch.no_grad():
        torch._foreach_zero_(list(model.parameters()))


def _load(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zero3.load_checkpoint(folder / "checkpoint", model, optimizer)


def _load_state(model: nn.Module, optimizer: Any, folder: Path) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _load_values(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zero3.load_full_state_dict(model, {})


def _save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zero3.save_checkpoint(folder / "other", model)


def _full_params(model: nn.Module, optimizer: Any, folder: Path) -> None:
    with zero3.full_params(model, writeback=True):
        pass


def _clip(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zero3.clip_grad_norm_(model, 1e-6)


def _set_trainable(model: nn.Module, optimizer: Any, folder: Path) -> None:
    zero3.set_trainable(model, lambda name, info: False)


USES = (_forward, _step, _step_of_torch, _step_by_turns, _by_hand, _as_data, _many)
USES += (_load, _load_state, _load_values, _save, _full_params, _clip, _set_trainable)


def _life(rank: Rank, folder: str) -> list[str]:
    """Each use in a child of its own. They use what the parent goes on with."""
    model = zero3.shard(seeded(linear, linear), nn.Linear, policy=ShardingPolicy(offload=folder))
    optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1))
    for _ in range(2):
        model(rows(2)).sum().backward()
        optimizer.step()
    zero3.save_checkpoint(Path(folder) / "checkpoint", model, optimizer)
    kept = [values for p in model.parameters() if p.grad is not None for values in (p.data, p.grad.data)]
    state = [value for each in optimizer.state.values() for value in each.values()]
    before = [values.clone() for values in (*kept, *state)]
    told = [in_child(lambda use=use: use(model, optimizer, Path(folder))) for use in USES]
    told.append(in_child(lambda: [values.zero_() for values in (*kept, *state)]))  # aliases that know nothing of it
    assert all(torch.equal(values, was) for values, was in zip((*kept, *state), before, strict=True))
    optimizer.zero_grad()
    model(rows(2)).sum().backward()
    optimizer.step()
    return told


@pytest.mark.skipif(sys.platform == "darwin", reason="forks of a process with threads")
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forked_child_is_refused_by_name_and_leaves_its_parents_chunks_alone(world_size: int, tmp_path: Path) -> None:
    for rank, told in enumerate(on_ranks(world_size, _life, str(tmp_path))):
        for use, said in zip(USES, told, strict=False):
            assert said.startswith("RuntimeError: process ") and "was forked from" in said, (rank, use.__name__, said)
        assert told[len(USES)] == ""
