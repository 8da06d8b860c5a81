"""The quick start, as a user runs it, against plain torch on whole batches."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.programs import ROOT, printed_by_two

EXAMPLE = ROOT / "examples" / "quickstart.py"
STEPS = 25


def held_out_loss(names: dict[str, Any], model: nn.Module) -> float:
    with torch.no_grad():
        return names["mean_loss"](model, names["sequences"](torch.Generator().manual_seed(2))).item()


def plainly_trained(names: dict[str, Any]) -> nn.Module:
    """One unsharded model after the same steps."""
    torch.manual_seed(0)
    model = names["Transformer"]()
    optimizer, draws = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        names["mean_loss"](model, names["sequences"](draws)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.slow
def test_quickstart_under_torchrun_trains_as_plain_torch_does(tmp_path: Path) -> None:
    printed = printed_by_two(EXAMPLE, "--steps", STEPS, "--output", tmp_path)

    names = runpy.run_path(str(EXAMPLE))
    trained, loaded = (float(loss) for loss in re.findall(r"held-out loss (\S+); .*: (\S+)", printed)[0])
    assert trained == loaded == pytest.approx(held_out_loss(names, plainly_trained(names)), abs=2e-4)
    plain = names["Transformer"]()
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert held_out_loss(names, plain) == pytest.approx(trained, abs=1e-4)


def test_quickstart_in_one_process_learns(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(EXAMPLE))["main"](["--steps", "40", "--output", str(tmp_path)])
    assert float(re.findall(r"held-out loss (\S+);", capsys.readouterr().out)[0]) < 1.5  # the logarithm of 31 words is 3.4
