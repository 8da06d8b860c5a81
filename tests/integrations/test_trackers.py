"""`report_to`: what tensorboard and wandb are told of a sharded run, offline: `make trackers`. The other tests do without both."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.processes import Rank, on_ranks
from tests.support.trainers import launched, llama, logged, trainer_of

pytestmark = pytest.mark.slow


def train(rank: Rank, tracker: str, directory: str) -> dict[str, Any]:
    with launched(rank), pytest.MonkeyPatch.context() as patch:
        for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": directory, "WANDB_SILENT": "true"}.items():
            patch.setenv(name, value)
        patch.setenv("TENSORBOARD_LOGGING_DIR", f"{directory}/tensorboard")
        trainer = trainer_of(True, llama(), f"{directory}/out", report_to=[tracker], save_strategy="no")
        trainer.train()
        if tracker == "wandb":
            import wandb

            told = dict(wandb.run.summary) if wandb.run is not None else {}
            wandb.finish()
            return {"losses": [loss for (loss,) in logged(trainer, "loss")], "told": told}
        return {"losses": [loss for (loss,) in logged(trainer, "loss")]}


def run(tracker: str, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if importlib.util.find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed: make trackers")
    first, second = on_ranks(2, train, tracker, str(directory), fresh=True)
    return first, second


def test_tensorboard_is_told_each_loss_once(tmp_path: Path) -> None:
    first, _ = run("tensorboard", tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (events,) = (tmp_path / "tensorboard").rglob("events.*")
    found = EventAccumulator(str(events.parent))
    found.Reload()
    assert np.allclose([each.value for each in found.Scalars("train/loss")], first["losses"], rtol=1e-6)
    assert {"train/grad_norm", "train/learning_rate"} <= set(found.Tags()["scalars"])


def test_wandb_is_told_offline_by_the_first_process(tmp_path: Path) -> None:
    first, second = run("wandb", tmp_path)
    (offline,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(offline.glob("*.wandb"))
    assert first["told"]["train/global_step"] > 1 and not second["told"]
