"""`if rank == 0: save_checkpoint(...)`, and every other function that all ranks have to call: ranks are told which, and who has not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.models import mlp, rows
from tests.support.processes import Rank, try_on_ranks
from tests.support.ranks import ThreadCommunicator, run_ranks
from zero3.comm import board

Call = Callable[["Life"], Any]


class Life:
    """A model that has trained for a while, so that nothing is compared in a step any more."""

    def __init__(self, group: Any, path: Path, name: str) -> None:
        self.group, self.path, self.spare = group, path, mlp()
        self.model: Any = zero3.shard(mlp(), [nn.Linear], process_group=group)
        self.optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(self.model), lr=0.01)
        self.scaler = zero3.GradScaler("cpu", init_scale=2.0)
        for _ in range(3):
            self.step()
        self.loss = self.model(rows(2)).sum()
        if name != "zero3.backward":
            self.loss.backward()

    def step(self) -> None:
        self.model(rows(2)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def entered(self, context: Any) -> None:
        with context:
            pass

    def scaled(self) -> None:
        self.scaler.scale(torch.ones(()))
        self.scaler.step(self.optimizer)


COLLECTIVE: dict[str, Call] = {
    "BatchFinder": lambda life: zero3.BatchFinder(life.model),
    "GradScaler.step": Life.scaled,
    "Zero3Layer": lambda life: zero3.Zero3Layer(life.spare, process_group=life.group),
    "zero3.backward": lambda life: zero3.backward(life.loss, 2, life.model),
    "check_optimizer": lambda life: zero3.check_optimizer(life.model, life.optimizer),
    "clip_grad_norm_": lambda life: zero3.clip_grad_norm_(life.model, 1.0),
    "fetch": lambda life: zero3.fetch(life.model),
    "full_gradients": lambda life: life.entered(zero3.full_gradients(life.model)),
    "full_optimizer_state_dict": lambda life: zero3.full_optimizer_state_dict(life.model, life.optimizer),
    "full_params": lambda life: life.entered(zero3.full_params(life.model)),
    "full_state_dict": lambda life: zero3.full_state_dict(life.model),
    "load_checkpoint": lambda life: zero3.load_checkpoint(life.path / "none", life.model),
    "load_full_optimizer_state_dict": lambda life: zero3.load_full_optimizer_state_dict(life.model, life.optimizer, {}),
    "load_full_state_dict": lambda life: zero3.load_full_state_dict(life.model, {}),
    "load_pretrained": lambda life: zero3.load_pretrained(life.model, life.path / "none"),
    "materialize": lambda life: zero3.materialize(life.model),
    "parked": lambda life: life.entered(zero3.parked(life.model, life.optimizer)),
    "param_groups": lambda life: zero3.param_groups(life.model, lambda name, info: {"lr": 0.1}),
    "parameter_norms": lambda life: zero3.parameter_norms(life.model),
    "reduce_gradients": lambda life: zero3.reduce_gradients(life.model),
    "release": lambda life: zero3.release(life.model),
    "resident": lambda life: life.entered(zero3.resident(life.model)),
    "save_checkpoint": lambda life: zero3.save_checkpoint(life.path / "saved", life.model),
    "save_merged": lambda life: zero3.save_merged(life.model, life.path / "merged"),
    "save_pretrained": lambda life: zero3.save_pretrained(life.model, life.path / "plain"),
    "set_forward_order": lambda life: zero3.set_forward_order(life.model, []),
    "set_trainable": lambda life: zero3.set_trainable(life.model, lambda name, info: True),
    "shard": lambda life: zero3.shard(life.spare, [nn.Linear], process_group=life.group),
    "stream_weights": lambda life: list(zero3.stream_weights(life.model)),
    "step_guard": lambda life: life.entered(zero3.step_guard(life.model)),
}
OTHERS = {
    "a class of values, or a function of files": {
        "Cluster",
        "Float8",
        "Int8",
        "MXFP4",
        "NF4",
        "OptimizerList",
        "ParamInfo",
        "ShardingPolicy",
        "latest_checkpoint",
        "plan",
    },
    "of this rank alone": {"get_trainable_chunk", "is_sharded", "named_gradients", "no_sync", "offload_activations", "profile"}
    | {"register_forward_method", "report", "reset"},
    "built of the above": {"Zero3Sequential", "check", "joinable"},
    "a part of a forward": {"attend", "causal_lm_loss", "linear_cross_entropy", "split_sequence", "tile"},
    "needs a process group, or files: below": {"ZeroRedundancyOptimizer", "offload_optimizer"},
}


def test_every_public_name_is_called_by_all_ranks_or_stands_aside() -> None:
    named = [name.removeprefix("zero3.").partition(".")[0] for name in COLLECTIVE] + [name for names in OTHERS.values() for name in names]
    assert sorted(named) == sorted(zero3.__all__)


def told(life: Life, act: Callable[[Life], object]) -> str:
    try:
        act(life)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", COLLECTIVE)
def test_a_function_that_one_rank_calls_while_another_trains_on_is_named_on_both(name: str, tmp_path: Path) -> None:
    def body(group: ThreadCommunicator) -> str:
        life = Life(group, tmp_path, name)
        return told(life, COLLECTIVE[name] if group.rank == 0 else Life.step)

    for text in run_ranks(2, body, timeout=20.0):
        assert f"Every rank has to call {name}" in text, text
        assert "rank 1 has not" in text


@pytest.mark.parametrize("name", ["clip_grad_norm_", "save_checkpoint", "shard"])
def test_a_function_that_another_rank_never_calls_is_named_at_the_timeout(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Also where more ranks than one have called it, which time out together."""
    monkeypatch.setattr(board, "_TELLING", 1.0)

    def body(group: ThreadCommunicator) -> str:
        life = Life(group, tmp_path, name)
        group.world.timeout = 0.2
        return told(life, COLLECTIVE[name]) if group.rank < 2 else ""

    for text in run_ranks(3, body)[:2]:
        assert f"Every rank has to call {name}; rank 2 has not." in text


def life_of_processes(rank: Rank, name: str, other: str, shared: bool) -> str:
    os.environ["ZERO3_HOST_MEMORY"] = "01"[shared]
    life = Life(torch.distributed.group.WORLD, rank.scratch, name)
    return told(life, COLLECTIVE[name] if rank.number == 0 else COLLECTIVE.get(other, Life.step))


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "messages"])
@pytest.mark.parametrize(("name", "other"), [
    ("save_checkpoint", "a step"),
    ("clip_grad_norm_", "a step"),
    ("clip_grad_norm_", "parameter_norms"),  # sums of other lengths: gloo's own would give both other numbers, or end a process
    ("parameter_norms", "GradScaler.step"),
])  # fmt: skip
@pytest.mark.slow
def test_a_function_that_one_process_calls_is_named_on_both(name: str, other: str, shared: bool) -> None:
    for outcome in try_on_ranks(2, life_of_processes, name, other, shared, fresh=True, group_timeout=4.0, debug="OFF"):
        assert f"Every rank has to call {name}; rank 1 has not (found at: " in outcome.value, outcome
