"""transformers' Trainer over sharded models gives what it gives under DistributedDataParallel, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.reference import assert_close
from tests.support.trainers import MODELS, launched, llama, logged, rows, trainer_of

pytestmark = pytest.mark.slow

BY_EPOCH = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
BEST = {**BY_EPOCH, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}


def weights_of(directory: Path, name: str) -> dict[str, Tensor]:
    """As users read them back."""
    if name == "LoRA":
        model: Any = peft.PeftModel.from_pretrained(llama(), directory)
    else:
        model = AutoModelForCausalLM.from_pretrained(directory)
    return {key: value.detach().clone() for key, value in model.named_parameters()}


def train(rank: Rank, ours: bool, name: str, directory: str) -> dict[str, Any]:
    """Trains, evaluates on the way, takes the best model, predicts, and saves."""
    with launched(rank):
        trainer = trainer_of(ours, MODELS[name](), directory, **BEST)
        trainer.train()
        best = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(rows(5, seed=2))
        trainer.save_model(f"{directory}/saved")
        torch.distributed.barrier()
        return {
            "losses": logged(trainer, "loss"), "norms": logged(trainer, "grad_norm"), "rates": logged(trainer, "learning_rate"),
            "evaluated": logged(trainer, "eval_loss"), "best": best, "best_step": trainer.state.best_global_step,
            "predicted": predicted.predictions, "metrics": predicted.metrics["test_loss"], "flos": trainer.state.total_flos,
            "kept": sorted(path.name for path in Path(directory).glob("checkpoint-*")),
        }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_trainer_gives_what_it_gives_under_ddp(name: str, tmp_path: Path) -> None:
    """Losses and norms as logged, weight decay by names (it is large), accumulation, evaluation, the best model, what is kept."""
    expected, _ = on_ranks(2, train, False, name, str(tmp_path / "ddp"), debug="OFF")
    found, other = on_ranks(2, train, True, name, str(tmp_path / "zero3"))
    assert len(expected["losses"]) == 6
    for key in ("losses", "norms", "evaluated"):
        assert np.allclose(found[key], expected[key], rtol=2e-5, atol=0), key
    for key in ("best", "metrics"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key
    for key in ("rates", "best_step", "kept", "flos"):
        assert found[key] == expected[key], key
    assert np.allclose(found["predicted"], expected["predicted"], atol=1e-4)
    assert np.array_equal(found["predicted"], other["predicted"])
    saved, reference = weights_of(tmp_path / "zero3" / "saved", name), weights_of(tmp_path / "ddp" / "saved", name)
    assert_close(saved, reference, 1e-4, "what save_model wrote")
    assert any(not torch.equal(value, before) for value, before in zip(reference.values(), MODELS[name]().parameters(), strict=True))


def groups(rank: Rank) -> dict[str, float]:
    """Of every parameter: its weight decay."""
    with launched(rank):
        trainer = trainer_of(True, MODELS["GPT-2"](), rank.scratch)
        trainer.create_optimizer()
        full = zero3.full_optimizer_state_dict(trainer.model, trainer.optimizer)
        return {name: group["weight_decay"] for group in full.get("param_groups", []) for name in group["params"]}


def test_weight_decay_is_by_the_parameters_own_names() -> None:
    found = on_ranks(2, groups)[0]
    model = MODELS["GPT-2"]()
    assert found == {name: 0.0 if "bias" in name or "ln_" in name else 0.1 for name, _ in model.named_parameters()}
    assert set(found.values()) == {0.0, 0.1}
