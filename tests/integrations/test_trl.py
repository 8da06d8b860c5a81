"""TRL's trainers with Zero3Mixin before them give what they give under DistributedDataParallel, on two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import SIZES, arguments, launched, llama, logged

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

from tests.support.chats import WORDS, chats, preferences, prompts, said, sums, tokenizer  # noqa: E402

pytestmark = pytest.mark.slow


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


def sft(ours: bool, lora: bool, directory: Path, given: Any = None, **options: Any) -> Any:
    chosen = {
        "assistant_only_loss": True,
        "max_length": 64,
        "max_steps": 4,
        "gradient_checkpointing": True,
        "bf16": False,
        "eval_strategy": "steps",
        "eval_steps": 2,
        **options,
    }
    data = {"train_dataset": chats(24), "eval_dataset": chats(5, 3), "processing_class": tokenizer(), "peft_config": adapters(lora)}
    data |= {"sequence_parallel": chosen.pop("sequence_parallel")} if "sequence_parallel" in chosen else {}
    return with_mixin(trl.SFTTrainer, ours)(model=given or model(), args=arguments(directory, trl.SFTConfig, **chosen), **data)


def sft_in_parts(rank: Rank, parts: int) -> dict[str, Any]:
    with launched(rank):
        trainer = sft(True, False, rank.scratch, per_device_train_batch_size=2, sequence_parallel=parts)
        trainer.train()
        return {key: logged(trainer, key) for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy")}


def test_sft_whose_ranks_share_sequences_gives_what_one_process_gives() -> None:
    (alone,) = on_ranks(1, sft_in_parts, 1)
    for found in on_ranks(2, sft_in_parts, 2):
        for key, values in alone.items():
            assert np.allclose(found[key], values, rtol=2e-5, atol=0), key


def dpo_in_parts(rank: Rank) -> None:
    with launched(rank):
        chosen = arguments(rank.scratch, trl.DPOConfig, **PLAIN, max_length=64)
        data = {"train_dataset": preferences(4), "processing_class": tokenizer()}
        with pytest.raises(ValueError, match="sequence_parallel=2: DPOTrainer needs whole sequences"):
            with_mixin(trl.DPOTrainer, True)(model=model(), ref_model=model(), args=chosen, sequence_parallel=2, **data)


def test_trainers_that_need_whole_sequences_refuse_parts() -> None:
    on_ranks(2, dpo_in_parts)


def dpo(ours: bool, lora: bool, directory: Path, pairs: Any = None, **options: Any) -> Any:
    options = {"max_steps": 4, "max_length": 64, "gradient_checkpointing": False, "bf16": False, **options}
    chosen = arguments(directory, trl.DPOConfig, **options)
    data = {"train_dataset": pairs or preferences(24), "processing_class": tokenizer(), "peft_config": adapters(lora)}
    return with_mixin(trl.DPOTrainer, ours)(model=model(), ref_model=None if lora else model(), args=chosen, **data)


def grpo(ours: bool, lora: bool, directory: Path, given: Any = None, **options: Any) -> Any:
    how = {"num_generations": 2, "max_completion_length": 12, "beta": 0.0, "gradient_checkpointing": False, "bf16": False}
    how |= {"generation_kwargs": {"eos_token_id": list(range(1, WORDS // 2))}}  # so that answers end early, and ranks at different lengths
    chosen = arguments(directory, trl.GRPOConfig, **{"max_steps": 3, **how, **options})
    data = {"train_dataset": prompts(24), "processing_class": tokenizer(), "peft_config": adapters(lora)}
    return with_mixin(trl.GRPOTrainer, ours)(model=given or model(), reward_funcs=by_length, args=chosen, **data)


def judged(count: int) -> Any:
    rows = [(said("user", q), said("assistant", a if n % 2 else wrong), bool(n % 2)) for n, (q, a, wrong) in enumerate(sums(count))]
    return datasets.Dataset.from_list([dict(zip(("prompt", "completion", "label"), row, strict=True)) for row in rows])


def kto(ours: bool, directory: Path, rows: Any = None, **options: Any) -> Any:
    chosen = arguments(directory, trl.KTOConfig, **{**PLAIN, "max_length": 64, **options})
    data = {"train_dataset": rows or judged(24), "processing_class": tokenizer()}
    return with_mixin(trl.KTOTrainer, ours)(model=model(), ref_model=model(), args=chosen, **data)


def rloo(ours: bool, directory: Path, given: Any = None, lora: bool = True, **options: Any) -> Any:
    answers = {"num_generations": 2, "max_completion_length": 8, "beta": 0.1}
    chosen = arguments(directory, trl.RLOOConfig, **{**PLAIN, **answers, **options})
    data = {"train_dataset": prompts(24), "processing_class": tokenizer(), "peft_config": adapters(lora)}
    return with_mixin(trl.RLOOTrainer, ours)(model=given or model(), reward_funcs=by_length, args=chosen, **data)


def reward(ours: bool, directory: Path, **options: Any) -> Any:
    """A head for one number."""
    torch.manual_seed(1)
    scorer = transformers.AutoModelForSequenceClassification.from_config(
        transformers.LlamaConfig(**SIZES | {"vocab_size": WORDS}, pad_token_id=0, num_labels=1)
    )
    chosen = arguments(directory, trl.RewardConfig, **{**PLAIN, "max_length": 64, **options})
    data = {"train_dataset": preferences(24), "processing_class": tokenizer()}
    return with_mixin(trl.RewardTrainer, ours)(model=scorer, args=chosen, **data)


PLAIN = {"max_steps": 3, "gradient_checkpointing": False, "bf16": False}
TRAINERS = {"SFT": sft, "DPO": dpo, "GRPO": grpo}
LOGGED = {
    "SFT": ("loss", "grad_norm", "mean_token_accuracy", "entropy"),
    "DPO": ("loss", "grad_norm", "rewards/margins", "logps/chosen"),
    "GRPO": ("loss", "grad_norm", "reward", "entropy"),
}


def train(rank: Rank, ours: bool, name: str, lora: bool) -> dict[str, Any]:
    with launched(rank):
        trainer = TRAINERS[name](ours, lora, rank.scratch)
        lengths: list[int] = []
        generate = trainer.model.generate
        trainer.model.generate = lambda **given: _noting(lengths, generate(**given))
        trainer.train()
        if ours:
            assert zero3.is_sharded(trainer.model)
            reference = getattr(trainer, "ref_model", None)
            assert reference is None or zero3.is_sharded(reference)
        return {"steps": logged(trainer, *LOGGED[name]), "evaluated": logged(trainer, "eval_loss"), "lengths": lengths}


def _noting(lengths: list[int], made: torch.Tensor) -> torch.Tensor:
    lengths.append(made.shape[1])
    return made


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_of_trl_gives_what_it_gives_under_ddp(name: str, lora: bool) -> None:
    expected = on_ranks(2, train, False, name, lora, debug="OFF")[0]
    found, other = on_ranks(2, train, True, name, lora)
    assert (found["lengths"] != other["lengths"]) == (name == "GRPO"), "ranks stop generating when they like"
    assert len(expected["steps"]) >= 3 and np.ptp([each[0] for each in expected["steps"]]) > 0
    assert np.allclose(found["steps"], expected["steps"], rtol=2e-4, atol=2e-5)
    assert np.allclose(found["evaluated"], expected["evaluated"], rtol=1e-5)


def train_others(rank: Rank, ours: bool) -> list[Any]:
    with launched(rank):
        found = []
        for trainer in (kto(ours, rank.scratch), rloo(ours, rank.scratch), reward(ours, rank.scratch)):
            trainer.train()
            assert zero3.is_sharded(trainer.model) == ours
            found.append(logged(trainer, "loss", "grad_norm"))
        return found


def test_other_trainers_of_trl_give_what_they_give_under_ddp() -> None:
    found, expected = on_ranks(2, train_others, True)[0], on_ranks(2, train_others, False, debug="OFF")[0]
    assert np.shape(expected) == (3, 3, 2) and np.ptp(expected, axis=1).all()
    assert np.allclose(found, expected, rtol=2e-4, atol=2e-5)


# -- what TRL does that others do not


def sharded_first(rank: Rank, lora: bool) -> dict[str, Any]:
    """TRL puts another forward over a sharded model's, which reads the weight of a head that is a layer of its own."""
    with launched(rank):
        given = model()
        transformers.set_seed(5)  # as TRL does before it makes adapters
        given = peft.get_peft_model(given, adapters(True)) if lora else given
        zero3.shard(given)
        trainer = sft(True, False, rank.scratch, given=given)
        head = trainer.model.get_output_embeddings()
        assert isinstance(head, zero3.Zero3Layer)
        trainer.train()
        return {"steps": logged(trainer, *LOGGED["SFT"]), "evaluated": logged(trainer, "eval_loss")}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "LoRA"])
def test_the_fused_head_of_a_model_that_was_sharded_first(lora: bool) -> None:
    expected = on_ranks(2, train, True, "SFT", lora)[0]
    found = on_ranks(2, sharded_first, lora)[0]
    assert np.allclose(found["steps"], expected["steps"], rtol=1e-5, atol=1e-6)
    assert np.allclose(found["evaluated"], expected["evaluated"], rtol=1e-5)


def mixed(rank: Rank, ours: bool) -> Any:
    with launched(rank):
        trainer = dpo(ours, False, rank.scratch, sync_ref_model=True, ref_model_sync_steps=1, ref_model_mixup_alpha=0.5)
        trainer.train()
        return logged(trainer, *LOGGED["DPO"])


def test_a_reference_that_follows_the_model_does_so_in_chunks() -> None:
    found, expected = on_ranks(2, mixed, True)[0], on_ranks(2, mixed, False, debug="OFF")[0]
    assert np.allclose(found, expected, rtol=2e-4, atol=2e-5)
    assert not np.allclose(expected, on_ranks(2, train, False, "DPO", False, debug="OFF")[0]["steps"], rtol=1e-3)


def precomputed(rank: Rank, kind: str, ahead: bool) -> Any:
    with launched(rank):
        if rank.number == 0:
            (preferences(24) if kind == "DPO" else judged(24)).save_to_disk(str(rank.scratch / "data"))
        torch.distributed.barrier()
        rows, how = datasets.load_from_disk(str(rank.scratch / "data")), {"precompute_ref_log_probs": ahead, "precompute_ref_batch_size": 3}
        trainer = dpo(True, True, rank.scratch, rows, **how) if kind == "DPO" else kto(True, rank.scratch, rows, **how)
        trainer.train()
        return logged(trainer, "loss")


@pytest.mark.parametrize("kind", ["DPO", "KTO"])
def test_the_reference_is_computed_in_the_constructor(kind: str) -> None:
    assert np.allclose(on_ranks(2, precomputed, kind, True)[0], on_ranks(2, precomputed, kind, False)[0], rtol=1e-5)


def without_gathering(rank: Rank) -> int:
    """DPO with adapters: `disable_adapter` around each forward of the reference."""
    import zero3.access

    with launched(rank):
        trainer = dpo(True, True, rank.scratch)
        entered: list[str] = []
        pinned = zero3.access.pinned
        zero3.access.pinned = lambda *args, **kwargs: entered.append("pinned") or pinned(*args, **kwargs)  # type: ignore[assignment, func-returns-value]
        try:
            trainer.train()
        finally:
            zero3.access.pinned = pinned
        return len(entered)


def test_disable_adapter_gathers_nothing() -> None:
    assert on_ranks(2, without_gathering) == [0, 0]


def sft_checkpoints(rank: Rank, directory: str) -> tuple[Any, Any]:
    with launched(rank):
        saving = {"save_strategy": "steps", "save_steps": 2, "packing": True, "bf16": True}
        first = sft(True, True, Path(directory), **saving)
        first.train()
        again = sft(True, True, Path(directory, "again"), **saving)
        again.train(resume_from_checkpoint=f"{directory}/checkpoint-2")
        return logged(first, "loss", "grad_norm"), logged(again, "loss", "grad_norm")


def test_sft_with_packing_in_bf16_is_resumed(tmp_path: Path) -> None:
    straight, resumed = on_ranks(2, sft_checkpoints, str(tmp_path))[0]
    assert len(straight) == 4 and resumed == straight
    peft.PeftModel.from_pretrained(model(), tmp_path / "checkpoint-4")
