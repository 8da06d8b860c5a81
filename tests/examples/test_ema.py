"""The example of averaged weights, as a user runs it, against torch's AveragedModel on the unsharded model."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "ema.py"
STEPS, LR, DECAY = 60, 0.5, 0.9


def run(*command: object) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run([str(part) for part in command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


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
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    printed = run(*launcher, EXAMPLE, "--steps", STEPS, "--lr", LR, "--decay", DECAY)
    last, averaged, again = (float(loss) for loss in re.findall(r": (\d+\.\d+)", printed))
    assert again == last != averaged
    assert [last, averaged] == pytest.approx(expected_losses(), abs=2e-4)


def test_it_says_what_it_takes() -> None:
    assert "--decay" in run(sys.executable, EXAMPLE, "--help")
