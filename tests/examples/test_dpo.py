"""The recipe for preferences: run as a user runs it, in short."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.programs import ROOT, printed_by_two

pytest.importorskip("trl", reason="the example's packages are not installed: pip install 'zero3[trl,examples]'")
pytest.importorskip("datasets")

from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLE = ROOT / "examples" / "dpo.py"
FEW = ["--device", "cpu", "--steps", 10, "--batch-size", 2]


def margins(printed: str) -> tuple[float, float]:
    first, last = re.findall(r"preferred answers: (-?[\d.]+) at first, (-?[\d.]+) at last", printed)[0]
    return float(first), float(last)


@pytest.mark.slow
def test_dpo_trains_a_model_and_adapters_on_ones_own_pairs(tmp_path: Path) -> None:
    first, last = margins(printed_by_two(EXAMPLE, *FEW, "--output", tmp_path / "model"))
    assert last > 2 * first > 0  # it has learned what is preferred
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tmp_path / "model")
    pairs = [{"prompt": f"Say {n}.", "chosen": f" {n}", "rejected": f" {n + 1}"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    own = ["--model", tmp_path / "model", "--data", tmp_path / "pairs.jsonl", "--lora", 4, "--lr", 1e-2]
    margins(printed_by_two(EXAMPLE, *FEW, *own, "--output", tmp_path / "adapters"))
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()
