"""The README's examples, as a user runs them: copied into a file, under torchrun, on two CPU processes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import zero3
from tests.support.programs import ROOT, printed_by, printed_by_two

README = (ROOT / "README.md").read_text()
RANKS = pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
BY_HAND, ANY_MODEL = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


def prints(directory: Path, ranks: int, code: str, *arguments: str) -> str:
    (directory / "script.py").write_text(code)
    if ranks == 1:
        return printed_by(sys.executable, "script.py", *arguments, directory=directory)
    return printed_by_two(directory / "script.py", *arguments, directory=directory)


def steps(printed: str) -> list[int]:
    """Of lines that tell a loss."""
    return [int(step) for step in re.findall(r"^step (\d+): loss [\d.]+$", printed, re.M)]


@RANKS
def test_the_readmes_example_of_layers_runs(ranks: int, tmp_path: Path) -> None:
    for word in ("writing", "replacing"):
        printed = prints(tmp_path, ranks, BY_HAND)
        assert f"{word} {tmp_path / 'weights.pt'}" in printed
        assert steps(printed) == list(range(10))
    plain = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)))
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))


@RANKS
def test_the_readmes_example_of_a_hugging_face_model_runs(ranks: int, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 32}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    model.save_pretrained(tmp_path / "model")
    printed = prints(tmp_path, ranks, ANY_MODEL, "model", "tuned")
    assert f"the tuned model is in {tmp_path / 'tuned'}" in printed and steps(printed) == [0, 1, 2]
    if ranks == 1:
        with pytest.raises(AssertionError, match="tuned is there already"):
            prints(tmp_path, ranks, ANY_MODEL, "model", "tuned")
    tuned = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").named_parameters())
    changes = [(tuned[name] - value).abs().max().item() for name, value in model.named_parameters()]
    assert all(0 < change < 3.1e-5 for change in changes)  # AdamW's first steps are as long as its rate, at most


def test_the_readmes_example_of_a_hugging_face_model_tells_its_arguments(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"usage: script\.py DIR TUNED"):
        prints(tmp_path, 1, ANY_MODEL)


def test_the_readme_names_all_that_is_public() -> None:
    assert not [name for name in zero3.__all__ if not re.search(rf"`{name}\b", README)]
