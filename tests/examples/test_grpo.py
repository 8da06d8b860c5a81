"""The loop of GRPO: run as a user runs it, in short. What it earns rises, and nobody has shown it an answer."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zero3
from tests.support.programs import ROOT, printed_by_two

transformers = pytest.importorskip("transformers")

EXAMPLE = ROOT / "examples" / "grpo.py"


def loaded() -> Any:
    spec = importlib.util.spec_from_file_location("grpo_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reward_of_grpo_counts_tokens_that_follow_the_one_before() -> None:
    texts = torch.tensor([[1, 2, 3, 4, 5], [8, 9, 0, 1, 2], [1, 2, 3, 3, 4], [5, 5, 5, 5, 5]])
    assert loaded().rewards(texts).tolist() == [1.0, 1.0, 0.75, 0.0]


def test_grpo_shows_the_model_every_digit() -> None:
    """Were 0 the padding, transformers would hide it."""
    example, seen = loaded(), []
    config = transformers.LlamaConfig(**example.SIZES, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    model = zero3.shard(transformers.LlamaForCausalLM(config))
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs.get("attention_mask")), with_kwargs=True)
    assert example.answered(model, torch.tensor([[3], [0]])).shape == (2, 5)
    assert seen and all(mask is None or mask.all() for mask in seen)


@pytest.mark.slow
def test_grpo_earns_more_than_at_first_and_leaves_a_picture_and_a_model(tmp_path: Path) -> None:
    printed = printed_by_two(EXAMPLE, "--device", "cpu", "--steps", 30, "--answers", 8, "--lr", 5e-3, "--output", tmp_path)
    first, last = map(float, re.findall(r"mean reward: ([\d.]+) at first, ([\d.]+) at last", printed)[0])
    assert first < 0.3 and last > first + 0.15, printed
    assert (tmp_path / "reward.png").stat().st_size > 5000
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
