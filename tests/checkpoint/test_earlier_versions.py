"""Checkpoints that released versions wrote are read: what is in them is what plain torch trains. `write` wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import zero3
from tests.support.ranks import ThreadCommunicator, run_ranks

WRITTEN = sorted((Path(__file__).parent / "written_by").iterdir())
STEPS = 2


def net() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter) / 8 - number / 4)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        model(torch.arange(8.0).view(2, 4) / 8 + step).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def write(path: Path) -> None:
    model = zero3.shard(net(), layers=nn.Linear)
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.125)
    train(model, optimizer, range(STEPS))
    zero3.save_checkpoint(path, model, optimizer, extra={"step": STEPS})


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_a_checkpoint_of_an_earlier_version_goes_on(path: Path, ranks: int) -> None:
    plain = net()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.125)
    train(plain, plain_optimizer, range(STEPS + 2))
    begun = [nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)) for _ in range(ranks)]

    def body(group: ThreadCommunicator) -> None:
        model = zero3.shard(begun[group.rank], layers=nn.Linear, process_group=group)
        optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=1.0)
        assert zero3.load_checkpoint(path, model, optimizer) == {"step": STEPS}
        train(model, optimizer, range(STEPS, STEPS + 2))
        found = zero3.full_state_dict(model, rank0_only=False)
        for name, expected in plain.state_dict().items():
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)

    run_ranks(ranks, body)


def test_this_version_has_left_a_checkpoint_and_writes_the_like(tmp_path: Path) -> None:
    own = {path.name: path for path in WRITTEN}[zero3.__version__]
    write(tmp_path / "now")
    before, now = (json.loads((path / "manifest.json").read_text()) for path in (own, tmp_path / "now"))
    assert before["version"] == now["version"] and before["tensors"] == now["tensors"] and before.keys() <= now.keys()
