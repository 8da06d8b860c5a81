"""The example of averaged weights, as a user runs it, against torch's AveragedModel on the unsharded model."""

from __future__ import annotations

import re
import runpy
import sys

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.programs import ROOT, printed_by, printed_by_two

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "ema.py"
STEPS, LR, DECAY = 60, 0.5, 0.9


def expected_losses() -> list[float]:
    """The last and the averaged weights' loss, by plain torch."""
    points = runpy.run_path(str(EXAMPLE))["points"]
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(2, 64), nn.Tanh()), nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 2)]
    model = nn.Sequential(*layers)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model)  # the first update copies
    optimizer, draws = torch.optim.SGD(model.parameters(), lr=LR), torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, label = points(16, draws)
        nn.functional.cross_entropy(model(x), label).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
    x, label = points(2000, torch.Generator().manual_seed(2))
    with torch.no_grad():
        return [nn.functional.cross_entropy(each(x), label).item() for each in (model, averaged)]


def test_averaged_chunks_are_the_averaged_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    printed = printed_by_two(EXAMPLE, "--steps", STEPS, "--lr", LR, "--decay", DECAY)
    last, averaged, again = (float(loss) for loss in re.findall(r": (\d+\.\d+)", printed))
    assert again == last != averaged
    assert [last, averaged] == pytest.approx(expected_losses(), abs=2e-4)


def test_it_says_what_it_takes() -> None:
    assert "--decay" in printed_by(sys.executable, EXAMPLE, "--help")
