"""The sweep over architectures: representative classes are right, what goes wrong ends one check alone, and a stopped sweep goes on."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.benchmarks.test_benchmarks import start

pytest.importorskip("transformers")
pytest.importorskip("peft")

# fused experts under LoRA, a vision tower of lists of lists, query tokens read by generate, modules without a forward
TYPES = ["olmoe", "florence2", "blip-2", "emu3"]


def test_representative_architectures_are_right(tmp_path: Path) -> None:
    done = start("architectures", "--output", str(tmp_path), "--types", *TYPES)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "architectures.jsonl").read_text().splitlines()]
    assert [row["type"] for row in rows] == sorted(TYPES)
    for row in rows:
        assert set(row["checks"]) == {"step", "checkpointing", "LoRA", "generate", "load", "save"}
        assert all(text in ("ok", "-") for text in row["checks"].values()), row
    assert "4 of 4" in done.stderr and "| olmoe | OlmoeForCausalLM | ok | ok | ok | ok | ok | ok |" in done.stdout
    again = start("architectures", "--output", str(tmp_path), "--types", *TYPES)
    assert again.stdout == done.stdout and " of " not in again.stderr, "nothing is done twice"
    assert len((tmp_path / "architectures.jsonl").read_text().splitlines()) == len(TYPES)


def test_sizes_of_full_models(tmp_path: Path) -> None:
    done = start("architectures", "--output", str(tmp_path), "--sizes", "--types", "gemma3n_text", "gemma2")
    assert done.returncode == 0, done.stderr
    rows = {row["type"]: row for row in map(json.loads, (tmp_path / "sizes.jsonl").read_text().splitlines())}
    assert rows["gemma3n_text"]["root"] < rows["gemma3n_text"]["largest"]
    assert rows["gemma2"]["tied"] == 256000 * 2304 and rows["gemma2"]["root"] > rows["gemma2"]["largest"], "its embedding is tied"
    assert "2 classes. The root is larger than every other layer in 1, in 0 of them what is not tied alone is." in done.stdout


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


def test_the_checks_see_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.architectures import sweep
    from zero3.core.gradient_reducer import GradientReducer

    real = GradientReducer.add
    monkeypatch.setattr(GradientReducer, "add", lambda self, index, gradient: real(self, index, gradient * 1.05))
    found = sweep.try_class("llama", 2, 60.0, ["step", "LoRA", "save"])
    assert found["step"].startswith("differs: ") and found["LoRA"].startswith("differs: ") and found["save"] == "ok"
