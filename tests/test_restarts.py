"""torchrun starts the example anew after a rank has died, and it ends with the losses of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import on_ranks
from tests.test_finetune import EXAMPLE, ROOT
from tests.test_finetune_resume import EVERY, KILLED, SIZES, STEPS, arguments, run

pytest.importorskip("transformers", reason="the example's packages are not installed: pip install 'zero3[examples]'")

# Rank 1 of the first attempt dies in the middle of a step.
DYING = f"""
import os, signal, sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import finetune, zero3
clip, calls = zero3.clip_grad_norm_, 0
def counting(*given):
    global calls
    calls += 1
    if calls == {KILLED} and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and "--dies" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    return clip(*given)
zero3.clip_grad_norm_ = counting
finetune.main([option for option in sys.argv[1:] if option != "--dies"])
"""


def launched(script: Path, output: Path, *options: object) -> tuple[list[float], str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    # Else the store outlives the processes, and those of the next attempt may find the addresses of the last (pytorch issue 135712).
    options_of_torch = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **options_of_torch, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    finished = subprocess.run(
        [str(part) for part in [*command, script, *SIZES, "--output", output, *options]],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return json.loads((output / "summary.json").read_text())["losses"], finished.stderr


def test_a_restarted_run_has_the_same_losses(tmp_path: Path) -> None:
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    expected = on_ranks(2, run, [arguments(tmp_path / "whole")], None, fresh=True)[0][0]
    found, told = launched(script, tmp_path / "cut", "--checkpoint-every", EVERY, "--resume", "--dies")
    assert "SIGKILL" in told or "-9" in told, "nobody died"
    assert len(expected) == STEPS
    assert found == expected
