"""Plans of experts at home: tokens take time on their way."""

from __future__ import annotations

from typing import Any

import torch
import transformers as t

import zero3
from tests.support.planned import PLANS
from zero3.__main__ import main

pytestmark = PLANS

CONFIG = t.Qwen3MoeConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=128, intermediate_size=8,
    moe_intermediate_size=4, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip
TOKENS, MEAN = 4096, 5 / 6  # of two experts of four, the other rank has at least one: 1 - 1 / 6


def test_plans_count_the_seconds_of_tokens_that_travel() -> None:
    """A row goes there and back, and so does its gradient."""
    with torch.device("meta"):
        model = t.Qwen3MoeForCausalLM(CONFIG)
    fast, slow = ({"flops": 1e15, "memory_bandwidth": 1e13, "link": link, "ranks_per_node": 1} for link in (1e12, 1e8))
    home, gathered = (
        [
            zero3.plan(
                model, ranks=2, sequence=TOKENS, policy=zero3.ShardingPolicy(expert_parallel=at_home), cluster=zero3.Cluster(**each)
            ).seconds
            for each in (fast, slow)
        ]
        for at_home in (True, False)
    )
    sent = 2 * TOKENS * MEAN * 4 * 64 * 4  # of two blocks, four times a row, in fp32
    experts = 3 * 2 * 4 * 3 * 64 * 4 * 4 / 2  # gathered twice and reduced once: half of them
    assert 0.9 * (sent - experts) / 1e8 < (home[1] - home[0]) - (gathered[1] - gathered[0]) < 1.5 * sent / 1e8


def test_the_command_line_plans_experts_at_home(tmp_path: Any, capsys: Any) -> None:
    config = t.Qwen3MoeConfig.from_dict({**CONFIG.to_dict(), "architectures": ["Qwen3MoeForCausalLM"]})
    config.save_pretrained(tmp_path)
    main(["plan", str(tmp_path), "--ranks", "2", "--sequence", "64", "--experts-at-home"])
    assert "all tokens to one rank's experts" in capsys.readouterr().out
