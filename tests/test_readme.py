"""The README's examples, as a user runs them: copied into a file, under torchrun, on two CPU processes."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import zero3
from tests.support.programs import ROOT, printed_by_two

README = (ROOT / "README.md").read_text()
BY_HAND, ANY_MODEL = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


def torchrun(directory: Path, code: str, *arguments: str) -> None:
    (directory / "script.py").write_text(code)
    printed_by_two(directory / "script.py", *arguments, directory=directory)


def test_the_readmes_example_of_layers_runs(tmp_path: Path) -> None:
    torchrun(tmp_path, BY_HAND + 'weights and torch.save(weights, "weights.pt")\n')
    plain = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8)))
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))


def test_the_readmes_example_of_a_hugging_face_model_runs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 32}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    model.save_pretrained(tmp_path / "model")
    torchrun(tmp_path, ANY_MODEL, str(tmp_path / "model"))
    tuned = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").named_parameters())
    steps = [(tuned[name] - value).abs().max().item() for name, value in model.named_parameters()]
    assert all(0 < step < 1.2e-5 for step in steps)  # AdamW's first step is as long as its rate


def test_the_readme_names_all_that_is_public() -> None:
    assert not [name for name in zero3.__all__ if not re.search(rf"`{name}\b", README)]
