"""Checkpoints often, on each host's own disk, beside a trainer's own, which are rarer and where all hosts see them."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import TrainerCallback

import zero3
from zero3.integrations.transformers import Zero3Mixin

STATE = "trainer_state.json"


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


class FastCheckpoints(TrainerCallback):
    """Every few steps, all that training needs to go on. A disk goes with its host, so the next host has a copy."""

    def __init__(self, directory: Path, every: int, run: str | None, frozen: bool) -> None:
        self.directory, self.every, self.run, self.frozen = directory, every, run, frozen

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, lr_scheduler: Any, **others: Any) -> None:
        if state.global_step % self.every or control.should_save:  # then the trainer saves
            return
        extra = {"state": json.dumps(asdict(state)), "schedule": lr_scheduler.state_dict()}
        path = self.directory / "-".join(filter(None, (self.run, f"step-{state.global_step}")))
        plain = getattr(optimizer, "optimizer", optimizer)
        kept = {"frozen": self.frozen, "keep_last": 2, "run": self.run}
        zero3.save_checkpoint(path, model, plain, extra=extra, local=True, replicas=1, **kept)


class GoesOn(Zero3Mixin):
    """Zero3Mixin for a trainer that goes on from such a checkpoint, too."""

    fast: Path | None = None

    def train_from(self, fast: Path) -> None:
        self.fast = fast
        extra = zero3.load_checkpoint(fast, self.model)
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / STATE).write_text(extra["state"])
            self.train(resume_from_checkpoint=directory)

    def _check(self, checkpoint: Path) -> None:
        if self.fast is None:
            super()._check(checkpoint)

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        if self.fast is None:
            super()._load_from_checkpoint(checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.fast is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        extra = zero3.load_checkpoint(self.fast, self.model, getattr(self.optimizer, "optimizer", self.optimizer), weights=False)
        self.lr_scheduler.load_state_dict(extra["schedule"])
        device = torch.cuda.get_rng_state() if self.args.device.type == "cuda" else None
        self.drawn = random.getstate(), numpy.random.get_state(), torch.get_rng_state(), device

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Random generators as they were saved: batches that are passed over have drawn from them."""
        if self.fast is None:
            super()._load_rng_state(checkpoint)
            return
        python, arrays, cpu, device = self.drawn
        random.setstate(python)
        numpy.random.set_state(arrays)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)
