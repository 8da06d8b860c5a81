"""A rank that is killed outside of its model's compute: in the optimizer's step, while it clips, while the state dict is gathered."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import zero3
from tests.support.processes import PROMPT, Rank, try_on_ranks
from zero3 import Zero3Layer, Zero3Sequential


def train_until_death(rank: Rank, where: str) -> None:
    model = Zero3Sequential([Zero3Layer(nn.Linear(64, 64)) for _ in range(3)])
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.01)

    def die(*_: Any) -> None:
        if rank.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(10):
        model(torch.ones(2, 64)).sum().backward()
        if step == 2 and where == "before clipping":
            die()
        zero3.clip_grad_norm_(model, 1.0)
        if step == 2 and where == "in step":
            optimizer.register_step_pre_hook(die)
        optimizer.step()
        optimizer.zero_grad()
        if step == 2 and where == "while saving":
            if rank.number == 1:
                model[1]._state.start_fetch = die  # type: ignore[method-assign]
            zero3.full_state_dict(model)


NEXT = {  # what the survivor does next
    "in step": "gathering layer '0' (Linear)",
    "before clipping": "summing up the norm of the gradients",
    "while saving": "gathering layer '1' (Linear)",
}


@pytest.mark.parametrize("where", NEXT)
def test_the_survivor_ends_with_a_named_error_in_seconds(where: str) -> None:
    survivor, killed = try_on_ranks(2, train_until_death, where, debug="OFF", fresh=True)
    assert killed.error == "killed"
    assert survivor.error == "RuntimeError", survivor
    assert survivor.text.startswith(f"rank 0 of 2: {NEXT[where]} failed: ")
    assert survivor.seconds < PROMPT, "it waited for the group's timeout"
