"""The examples of docs/integrations.md, each run on two processes as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import collate, launched, llama, rows

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
EXAMPLES = dict(re.findall(r"^## (\w+)\n.*?^```python\n(.*?)^```$", PAGE, re.M | re.S))


def run(rank: Rank, name: str) -> bool:
    with launched(rank):
        loader = torch.utils.data.DataLoader(rows(8, length=8), batch_size=1, collate_fn=collate)  # type: ignore[arg-type, var-annotated]
        names: dict[str, Any] = {"directory": str(rank.scratch), "model": llama(), "loader": loader, "collate": collate}
        names |= {"examples": rows(16), "held_out": rows(4, seed=1)}
        if name == "TRL":
            import peft

            from tests.support.chats import WORDS, chats, tokenizer

            adapters = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
            names |= {"model": llama(vocab_size=WORDS), "chats": chats(16), "tokenizer": tokenizer(), "lora": adapters}
        exec(compile(EXAMPLES[name], f"the example of {name}", "exec"), names)
        return zero3.is_sharded(names["trainer"].model if "trainer" in names else names["model"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Trainer", "TRL", "accelerate"])
def test_an_example_of_the_integrations_runs(name: str) -> None:
    if name == "TRL":
        pytest.importorskip("trl")
    assert set(EXAMPLES) == {"Trainer", "TRL", "accelerate", "Lightning", "Fabric"}, (
        "the last two are in tests/integrations/test_lightning.py"
    )
    assert on_ranks(2, run, name) == [True, True]
