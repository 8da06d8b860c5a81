"""Optimizers that the Trainer would make, and that can't have chunks."""

from __future__ import annotations

from typing import Any

import pytest

import zero3
from tests.support.offloaded import in_files
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import launched, llama, logged, trainer_of


def same_losses_in_files(rank: Rank) -> None:
    """The trainer offloads its optimizer when the policy offloads chunks."""
    with launched(rank):
        losses = []
        for place in (None, rank.scratch):
            trainer = trainer_of(True, llama(), rank.scratch / str(place is None), policy=zero3.ShardingPolicy(offload=place), max_steps=3)
            trainer.train()
            losses.append(logged(trainer, "loss", "grad_norm"))
        assert losses[0] == losses[1] and len(losses[0]) > 1
        state = trainer.optimizer.optimizer.state.values()
        assert in_files([value for kept in state for value in kept.values() if value.ndim])


def test_offload_gives_the_same_losses() -> None:
    on_ranks(2, same_losses_in_files)


def refuse_what_takes_the_model(rank: Rank) -> None:
    """transformers makes Muon and others by a function of the whole model."""

    def factory(model: Any, **options: Any) -> None:
        raise AssertionError("it was called")

    with launched(rank):
        trainer = trainer_of(True, llama(), rank.scratch)
        trainer.optimizer_cls_and_kwargs = factory, {}
        with pytest.raises(ValueError, match="divides whole parameters itself, and has chunks here"):
            trainer.create_optimizer()


def test_an_optimizer_that_takes_the_model_is_refused_by_name() -> None:
    on_ranks(1, refuse_what_takes_the_model)
