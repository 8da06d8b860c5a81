"""The sweep over architectures: representative classes are right, what goes wrong ends one check alone, and a stopped sweep goes on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from tests.benchmarks.test_benchmarks import start
from tests.support.inside import changed_gradients

pytestmark = pytest.mark.slow

pytest.importorskip("transformers")
pytest.importorskip("peft")

# fused experts under LoRA, a vision tower of lists of lists, query tokens read by generate, modules without a forward
TYPES = ["olmoe", "florence2", "blip-2", "emu3"]


def test_representative_architectures_are_right(tmp_path: Path) -> None:
    """In two runs, of which the second goes on where the first was."""
    for wanted in (TYPES[:1], TYPES):
        done = start("architectures", "--output", str(tmp_path), "--types", *wanted)
        assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "architectures.jsonl").read_text().splitlines()]
    assert sorted(row["type"] for row in rows) == sorted(TYPES), "nothing is done twice"
    for row in rows:
        assert set(row["checks"]) == {"step", "experts", "checkpointing", "LoRA", "generate", "load", "save"}
        assert all(text in ("ok", "-") for text in row["checks"].values()), row
    assert "3 of 3" in done.stderr and "| olmoe | OlmoeForCausalLM | ok | ok | ok | ok | ok | ok | ok |" in done.stdout


def test_sizes_of_full_models() -> None:
    from benchmarks.architectures.main import sizes_table
    from benchmarks.architectures.sizes import measure

    rows = {kind: {"type": kind, "class": "", **measure(kind)} for kind in ("gemma3n_text", "gemma2", "timm_wrapper")}
    assert rows["gemma3n_text"]["root"] < rows["gemma3n_text"]["largest"]
    assert rows["gemma2"]["tied"] == 256000 * 2304 and rows["gemma2"]["root"] > rows["gemma2"]["largest"], "its embedding is tied"
    table = sizes_table(rows.values())
    assert "2 classes. The root is larger than every other layer in 1; without what is tied, in 0." in table
    assert "| gemma2 |" in table and "* timm_wrapper" in table


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks are forks of this process, which has used autograd")


@no_gpu
def test_a_check_that_crashes_or_hangs_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.architectures import sweep, trial

    def wait(subject: trial.Subject) -> None:
        time.sleep(100)

    def differ(subject: trial.Subject) -> None:
        raise trial.Differs("this and that")

    fakes = {"crash": lambda subject: os._exit(3), "hang": wait, "differ": differ, "fine": lambda subject: None}
    monkeypatch.setattr(trial, "CHECKS", fakes)
    found = sweep.try_class("llama", 2, 8.0, list(fakes))
    assert found == {"crash": "died", "hang": "hangs for 8 s", "differ": "differs: this and that", "fine": "ok"}
    assert sweep.try_class("timm_wrapper", 2, 60.0, ["fine"])["build"].startswith("no model: ")


@no_gpu
def test_the_checks_see_a_wrong_gradient() -> None:
    from benchmarks.architectures import sweep

    with changed_gradients(lambda name, gradient: gradient * 1.05):
        found = sweep.try_class("llama", 2, 60.0, ["step", "LoRA", "save"])
    assert found["step"].startswith("differs: ") and found["LoRA"].startswith("differs: ") and found["save"] == "ok"
