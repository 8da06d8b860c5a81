"""Optimizers that the Trainer would make, and that can't have chunks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.processes import Rank, on_ranks
from tests.support.trainers import launched, llama, trainer_of


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
