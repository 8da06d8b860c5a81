"""Optimizers that the Trainer would make, and that can't have chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

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


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm, if it was made so: what decides is in no group."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, *, normed: bool = False, **options: Any) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)
        self.normed = normed

    def step(self, closure: Any = None) -> None:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None):
            if self.normed and parameter.numel():
                parameter.grad = parameter.grad / parameter.grad.norm().clamp(min=1e-6)
        super().step()


def refuse_what_needs_whole_parameters(rank: Rank) -> None:
    from zero3.integrations.accelerate import Zero3Accelerator

    whole = r".*\{\"whole\": True\}\).*zero3\.shard.*optimizers=\(optimizer, None\)"
    with launched(rank):
        with pytest.raises(ValueError, match=r"^optim='adafactor': .*Adafactor.*" + whole):
            trainer_of(True, llama(), rank.scratch, optim="adafactor").train()
        for normed in (False, True):
            trainer = trainer_of(True, llama(), rank.scratch)
            trainer.optimizer_cls_and_kwargs = Normed, {"lr": 0.1, "normed": normed}
            if normed:
                with pytest.raises(ValueError, match=r"Normed .*does more than treat each element by itself" + whole):
                    trainer.create_optimizer()
            else:
                trainer.create_optimizer()
        model = llama()
        with pytest.raises(ValueError, match=r"Normed .*does more than treat each element by itself.*whole"):
            Zero3Accelerator(cpu=True).prepare(model, Normed(model.parameters(), lr=0.1, normed=True))


def test_an_optimizer_that_needs_whole_parameters_is_refused_by_name() -> None:
    """By the Trainer and by accelerate, also if what it does is decided by an argument that is in no group."""
    on_ranks(1, refuse_what_needs_whole_parameters)


def whole(rank: Rank, ours: bool) -> Any:
    """What the refusal says."""
    with launched(rank):
        model = llama()
        if ours:
            groups: Any = zero3.param_groups(zero3.shard(model), lambda name, info: {"whole": True})
        else:
            groups = model.parameters()
        optimizer = Normed(groups, lr=0.01, normed=True)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        trainer = trainer_of(ours, model, rank.scratch, optimizers=(optimizer, schedule), max_steps=3)
        trainer.train()
        return logged(trainer, "loss", "grad_norm")


def test_an_optimizer_of_whole_parameters_is_passed_to_the_trainer() -> None:
    expected, found = on_ranks(2, whole, False, debug="OFF")[0], on_ranks(2, whole, True)[0]
    assert len(expected) == 3 and np.allclose(found, expected, rtol=1e-5)
