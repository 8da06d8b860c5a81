"""TRL's trainers with Zero3Mixin before them give what they give under DistributedDataParallel, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import arguments, launched, llama, logged

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")

from tests.support.chats import WORDS, chats, preferences, prompts, tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed:FutureWarning")


def with_mixin(kind: type, ours: bool) -> type:
    if not ours:
        return kind
    from zero3.integrations.transformers import Zero3Mixin

    return type(f"Zero3{kind.__name__}", (Zero3Mixin, kind), {})


def adapters(lora: bool) -> Any:
    return peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM") if lora else None


def model() -> Any:
    return llama(vocab_size=WORDS, num_hidden_layers=2)


def by_length(completions: list[Any], **others: Any) -> list[float]:
    return [len(each[0]["content"]) + sum(map(ord, each[0]["content"])) % 7 for each in completions]


def sft(ours: bool, lora: bool, directory: Path, **options: Any) -> Any:
    chosen = {"assistant_only_loss": True, "max_length": 64, "gradient_checkpointing": True, "bf16": False, "eval_strategy": "steps", "eval_steps": 2, **options}
    data = {"train_dataset": chats(24), "eval_dataset": chats(5, 3), "processing_class": tokenizer(), "peft_config": adapters(lora)}
    return with_mixin(trl.SFTTrainer, ours)(model=model(), args=arguments(directory, trl.SFTConfig, max_steps=4, **chosen), **data)


def dpo(ours: bool, lora: bool, directory: Path) -> Any:
    chosen = arguments(directory, trl.DPOConfig, max_steps=4, max_length=64, gradient_checkpointing=False, bf16=False)
    data = {"train_dataset": preferences(24), "processing_class": tokenizer(), "peft_config": adapters(lora)}
    return with_mixin(trl.DPOTrainer, ours)(model=model(), ref_model=None if lora else model(), args=chosen, **data)


def grpo(ours: bool, lora: bool, directory: Path) -> Any:
    how = {"num_generations": 2, "max_completion_length": 6, "beta": 0.0, "gradient_checkpointing": False, "bf16": False}
    chosen = arguments(directory, trl.GRPOConfig, max_steps=3, **how)
    data = {"train_dataset": prompts(24), "processing_class": tokenizer(), "peft_config": adapters(lora)}
    return with_mixin(trl.GRPOTrainer, ours)(model=model(), reward_funcs=by_length, args=chosen, **data)


TRAINERS = {"SFT": sft, "DPO": dpo, "GRPO": grpo}
LOGGED = {
    "SFT": ("loss", "grad_norm", "mean_token_accuracy", "entropy"),
    "DPO": ("loss", "grad_norm", "rewards/margins", "logps/chosen"),
    "GRPO": ("loss", "grad_norm", "reward", "entropy"),
}


def train(rank: Rank, ours: bool, name: str, lora: bool) -> dict[str, Any]:
    with launched(rank):
        trainer = TRAINERS[name](ours, lora, rank.scratch)
        trainer.train()
        if ours:
            assert zero3.is_sharded(trainer.model)
            reference = getattr(trainer, "ref_model", None)
            assert reference is None or zero3.is_sharded(reference)
        return {"steps": logged(trainer, *LOGGED[name]), "evaluated": logged(trainer, "eval_loss")}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_of_trl_gives_what_it_gives_under_ddp(name: str, lora: bool) -> None:
    expected = on_ranks(2, train, False, name, lora, debug="OFF")[0]
    found = on_ranks(2, train, True, name, lora)[0]
    assert len(expected["steps"]) >= 3 and np.ptp([each[0] for each in expected["steps"]]) > 0
    assert np.allclose(found["steps"], expected["steps"], rtol=2e-4, atol=2e-5)
    assert np.allclose(found["evaluated"], expected["evaluated"], rtol=1e-5)
