"""`auto_find_batch_size=True`: batches that do not fit on one rank are cut on all, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.processes import Rank, on_ranks
from tests.support.trainers import WORDS, launched, llama, logged, trainer_of
from zero3 import ShardingPolicy

ROOM = 1  # rows that fit on the second rank, from the second step on


class Rows(nn.Module):
    """Its loss is a mean over rows, whatever is in them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        x = (self.embedding(input_ids) * attention_mask[..., None]).sum(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"loss": (x - 0.5).square().mean(), "logits": x}


def tighten(model: nn.Module, rank: int) -> None:
    block = (model.model if hasattr(model, "model") else model).layers[1]
    calls = SimpleNamespace(seen=0)

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        calls.seen += 1
        if rank == 1 and torch.is_grad_enabled() and calls.seen > 3 and len(args[0]) > ROOM:
            raise torch.OutOfMemoryError("made up")

    block.register_forward_pre_hook(before)


MODELS = {"tokens": llama, "rows": Rows}


def train(rank: Rank, ours: bool, name: str, sync: bool, directory: str) -> dict[str, Any]:
    options = {"auto_find_batch_size": True} if ours else {}
    kept = {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": sync}}}
    with launched(rank):
        trainer = trainer_of(ours, MODELS[name](), directory, per_device_train_batch_size=4, max_steps=4, **options, **kept)
        if ours:
            tighten(trainer.model, rank.number)
        trainer.train()
        size = trainer._zero3_finder.batch_size if ours else None
        return {"losses": logged(trainer, "loss"), "norms": logged(trainer, "grad_norm"), "size": size, "steps": trainer.state.global_step}


@pytest.mark.parametrize(
    ("name", "sync"),
    [("tokens", True), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("rows", True), ("tokens", False), ("rows", False)])],
)
def test_a_trainer_whose_batch_does_not_fit_gives_what_it_gives_under_ddp(name: str, sync: bool, tmp_path: Path) -> None:
    expected, _ = on_ranks(2, train, False, name, sync, str(tmp_path / "ddp"), debug="OFF")
    for found in on_ranks(2, train, True, name, sync, str(tmp_path / "zero3")):
        assert (found["size"], found["steps"]) == (ROOM, 4)
        for key in ("losses", "norms"):
            assert len(found[key]) == 4
            assert np.allclose(found[key], expected[key], rtol=2e-5, atol=0), key


def refuse(rank: Rank) -> None:
    with launched(rank):
        for policy in (ShardingPolicy(stage=1), ShardingPolicy(stage=2), ShardingPolicy(dynamic=True)):
            with pytest.raises(ValueError, match=r"auto_find_batch_size=True: .*BatchFinder needs"):
                trainer_of(True, llama(), rank.scratch, auto_find_batch_size=True, policy=policy)


def test_auto_find_batch_size_refuses_what_step_guard_can_t_repeat() -> None:
    on_ranks(1, refuse)


def refuse_pairs(rank: Rank) -> None:
    from tests.integrations import test_trl as makers

    with launched(rank), pytest.raises(ValueError, match=r"^auto_find_batch_size=True: rows of this trainer's batches belong together"):
        makers.dpo(True, False, rank.scratch, auto_find_batch_size=True)


def test_auto_find_batch_size_is_refused_where_rows_belong_together() -> None:
    pytest.importorskip("trl")
    on_ranks(1, refuse_pairs)
