"""What a Trainer over a sharded model takes and refuses: precision, models that are sharded or empty, optimizers, a rank that fails."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import TrainerCallback, TrainingArguments

import zero3
from tests.support.processes import PROMPT, Rank, on_ranks, try_on_ranks
from tests.support.trainers import collate, launched, llama, logged, rows, trainer_of


def losses(trainer: Any) -> np.ndarray[Any, Any]:
    trainer.train()
    return np.array(logged(trainer, "loss"))


# -- precision


def low(rank: Rank, ours: bool, stored: str) -> tuple[Any, list[str], list[str]]:
    with launched(rank):
        trainer = trainer_of(ours, llama().to(getattr(torch, stored)), rank.scratch, bf16=True)
        found = losses(trainer)
        computed = []
        if ours:
            layer = next(module for module in trainer.model.modules() if isinstance(module, zero3.Zero3Layer))
            layer.module.register_forward_pre_hook(lambda module, args: computed.append(str(next(module.parameters()).dtype)))
            trainer.evaluate()
        return found, sorted({str(chunk.dtype) for chunk in trainer.model.parameters()}), computed[:1]


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_bf16_computes_in_bf16_over_fp32_masters(stored: str) -> None:
    expected = on_ranks(2, low, False, "float32", debug="OFF")[0][0]
    found, dtypes, computed = on_ranks(2, low, True, stored)[0]
    assert dtypes == ["torch.float32"] and computed == ["torch.bfloat16"]
    assert np.allclose(found, expected, rtol=2e-2) and not np.array_equal(found, expected)


def pre_sharded(rank: Rank) -> tuple[Any, Any, Any]:
    """`bf16=True` for a model whose policy has no opinion: autocast, as under DDP. A policy of one's own is used."""
    with launched(rank):
        autocast = losses(trainer_of(True, zero3.shard(llama()), rank.scratch, bf16=True))
        own = trainer_of(True, llama(), rank.scratch, policy=zero3.ShardingPolicy(prefetch_depth=0))
        assert "prefetch_depth=0" in zero3.report(own.model).policies[0]
        return autocast, losses(own), losses(trainer_of(True, zero3.shard(llama()), rank.scratch))


@pytest.mark.slow
def test_a_model_that_is_sharded_already_keeps_its_policy() -> None:
    under_autocast, own, plain = on_ranks(2, pre_sharded)[0]
    expected = on_ranks(2, low, False, "float32", debug="OFF")[0][0]
    assert np.allclose(under_autocast, expected, rtol=2e-3)
    assert np.array_equal(own, plain)


def refused_precision(rank: Rank) -> str:
    with launched(rank):
        with pytest.raises(ValueError, match="fp16 on the device cpu") as caught:
            trainer_of(True, llama(), rank.scratch, fp16=True)
        with pytest.raises(RuntimeError, match=r"^DistributedDataParallel around a sharded model"):
            trainer_of(False, zero3.shard(llama()), rank.scratch).train()
    return str(caught.value)


def test_fp16_on_a_device_without_it_and_the_stock_trainer_are_refused_by_name() -> None:
    on_ranks(2, refused_precision)


# -- models


def refuse_arguments(rank: Rank) -> None:
    with launched(rank):
        with pytest.raises(ValueError, match=r"^rank 1: bf16_full_eval=True: it would convert"):  # on all ranks
            trainer_of(True, llama(), rank.scratch, bf16_full_eval=rank.number == 1)
        told = "fsdp=.*: zero3 shards the model itself|no available devices"  # as transformers 5.1 says
        with pytest.raises((ValueError, RuntimeError), match=told):
            trainer_of(True, llama(), rank.scratch, fsdp=True)
        model = llama()
        optimizer = torch.optim.AdamW((llama() if rank.number else model).parameters())
        with pytest.raises(ValueError, match=r"^rank 1: the AdamW holds .*no sharded model trains"):
            trainer_of(True, model, rank.scratch, optimizers=(optimizer, None))
        assert not zero3.is_sharded(model)


def test_arguments_that_would_part_ranks_convert_or_shard_again_are_refused_by_name() -> None:
    on_ranks(2, refuse_arguments, fresh=True)  # transformers leaves `fsdp` in the process's environment


def test_the_mixin_comes_first() -> None:
    from transformers import Seq2SeqTrainer

    from zero3.integrations.transformers import Zero3Mixin

    with pytest.raises(TypeError, match=r"class Wrong: Seq2SeqTrainer stands before Zero3Mixin"):
        type("Wrong", (Seq2SeqTrainer, Zero3Mixin), {})
    type("Again", (type("Right", (Zero3Mixin, Seq2SeqTrainer), {}),), {})


def apart() -> Any:
    """The trainer's own random numbers stay as they were."""
    with torch.random.fork_rng(devices=[]):
        return llama()


def on_meta(rank: Rank) -> Any:
    with launched(rank):
        with torch.device("meta"):
            empty = llama()
        with pytest.raises(ValueError, match=r"rank 0: .*no values.*embed_tokens.*meta device.*load_pretrained.*materialize"):
            trainer_of(True, empty, rank.scratch)
        assert not zero3.is_sharded(empty)
        if rank.number == 0:
            llama().save_pretrained(rank.scratch / "files")
        torch.distributed.barrier()
        zero3.load_pretrained(zero3.shard(empty, device="cpu"), rank.scratch / "files")
        made = trainer_of(True, None, rank.scratch, model_init=apart)
        assert zero3.is_sharded(made.model)
        loaded = losses(trainer_of(True, empty, rank.scratch))
        return loaded, losses(made), losses(trainer_of(True, llama(), rank.scratch))


@pytest.mark.slow
def test_a_model_on_meta_is_refused_until_it_is_sharded_and_loaded() -> None:
    """And one that the trainer is to make itself (`model_init`) is sharded whenever it is made."""
    loaded, made, expected = on_ranks(2, on_meta)[0]
    assert np.array_equal(loaded, expected) and np.array_equal(made, expected)


def different_lengths(rank: Rank) -> tuple[list[int], Any]:
    with launched(rank):
        trainer = trainer_of(True, llama(), rank.scratch)
        prompt = torch.tensor([[5, 6, 7]])
        made = trainer.model.generate(prompt, max_new_tokens=3 + 4 * rank.number, do_sample=False, eos_token_id=None)
        return made[0].tolist(), losses(trainer)


def test_generate_lets_ranks_stop_at_different_lengths() -> None:
    (short, first), (long, second) = on_ranks(2, different_lengths)
    assert len(short) == 6 and len(long) == 10 and long[:6] == short
    assert np.array_equal(first, second)
    assert llama().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, eos_token_id=None)[0].tolist() == short


# -- optimizers


def own_optimizers(rank: Rank) -> dict[str, Any]:
    from zero3.integrations.transformers import Zero3Trainer

    class ByName(Zero3Trainer):
        """As many trainers do it: a filter over what `named_parameters()` gives."""

        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            named = list(self.model.named_parameters())
            groups = [
                {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0},
                {"params": [p for n, p in named if "norm" not in n]},
            ]
            self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
            return self.optimizer

    class Flat(Zero3Trainer):
        """An optimizer that looks at shapes, over the parameters that the model has: flat chunks."""

        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.optimizer = Adafactor(self.model.parameters(), lr=1e-2, relative_step=False)
            return self.optimizer

    with launched(rank):
        from transformers import Adafactor

        from tests.support.trainers import arguments

        with pytest.raises(ValueError, match=r"group 0 of the AdamW \(weight_decay=0\.0.*is empty.*zero3\.param_groups"):
            ByName(model=llama(), args=arguments(rank.scratch), train_dataset=rows(8), data_collator=collate).train()
        with pytest.raises(ValueError, match=r"Adafactor.*whole"):
            Flat(model=llama(), args=arguments(rank.scratch), train_dataset=rows(8), data_collator=collate).train()
        model = llama()
        norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
        rest = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
        given = torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1 / (1 + step))
        trainer = trainer_of(True, model, rank.scratch, optimizers=(given, schedule))
        handed = losses(trainer)
        counts = [sum(parameter.numel() for parameter in group["params"]) for group in given.param_groups]
        return {"handed": handed, "counts": counts, "norms": [parameter.numel() for parameter in norms]}


def stock_optimizer(rank: Rank) -> Any:
    with launched(rank):
        model = llama()
        norms = [parameter for name, parameter in model.named_parameters() if "norm" in name]
        rest = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
        given = torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(given, lambda step: 1 / (1 + step))
        return losses(trainer_of(False, model, rank.scratch, optimizers=(given, schedule)))


@pytest.mark.slow
def test_optimizers_of_ones_own_are_handed_the_chunks_or_refused() -> None:
    expected = on_ranks(2, stock_optimizer, debug="OFF")[0]
    found = on_ranks(2, own_optimizers)
    assert np.allclose(found[0]["handed"], expected, rtol=1e-5)
    assert sum(each["counts"][1] for each in found) == sum(found[0]["norms"])


# -- a rank that fails


class Fails(nn.Module):
    """A callback's worth of trouble: raises on one rank, in the forward of one step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.calls = rank, 0

    def __call__(self, module: nn.Module, args: Any) -> None:
        self.calls += 1
        if self.calls == 4 and torch.distributed.get_rank() == self.rank:
            raise KeyError("no such word")


def fail_on_one(rank: Rank) -> None:
    with launched(rank):
        model = llama()
        trainer = trainer_of(True, model, rank.scratch)
        model.model.layers[1].register_forward_pre_hook(Fails(1))
        trainer.train()


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_train_on_all() -> None:
    first, second = try_on_ranks(2, fail_on_one, fresh=True, group_timeout=6.0)
    assert second.error == "RuntimeError" and second.text.startswith("rank 1: KeyError: 'no such word'")
    assert first.error == "RuntimeError" and "rank 1: KeyError: 'no such word'" in first.text and "rank 0" in first.text
    assert first.seconds < PROMPT


def test_an_own_type_of_error_stays_what_it_was_on_one_process(tmp_path: Path) -> None:
    outcome = try_on_ranks(1, fail_alone, str(tmp_path))[0]
    assert outcome.error == "KeyError"


def fail_alone(rank: Rank, directory: str) -> None:
    with launched(rank):
        model = llama()
        trainer = trainer_of(True, model, directory)
        model.model.layers[1].register_forward_pre_hook(Fails(0))
        trainer.train()


class Stops(TrainerCallback):
    """On one rank, in the second step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        control.should_training_stop = state.global_step == 2 and torch.distributed.get_rank() == 1


def stop_on_one(rank: Rank) -> None:
    with launched(rank):
        trainer_of(True, llama(), rank.scratch, callbacks=[Stops()]).train()


@pytest.mark.slow
def test_a_rank_that_waits_is_told_which_one_has_ended_train() -> None:
    first, second = try_on_ranks(2, stop_on_one, fresh=True, group_timeout=6.0)
    assert not second.error and first.error == "RuntimeError"
    assert first.text.startswith("rank 1 has ended train() after 2 steps\nrank 0")


# -- ranks that differ


DIFFERING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"arguments of training: max_grad_norm \(rank 0: 1\.0; rank 1: 0\.1\)": ({"max_grad_norm": 1.0}, {"max_grad_norm": 0.1}),
    r"arguments of training: gradient_accumulation_steps \(rank 0: 1; rank 1: 2\), max_steps \(rank 0: 3; rank 1: 4\)": (
        {"gradient_accumulation_steps": 1, "max_steps": 3},
        {"gradient_accumulation_steps": 2, "max_steps": 4},
    ),
    r"arguments of training: save_strategy \(rank 0: \"steps\"; rank 1: \"no\"\)": ({"save_strategy": "steps"}, {"save_strategy": "no"}),
    r"arguments of training: seed \(rank 0: 1; rank 1: 2\)": ({"seed": 1}, {"seed": 2}),
    r"how long they train: batches of an epoch \(rank 0: 8; rank 1: 4\), steps \(rank 0: 4; rank 1: 2\)": (
        {"max_steps": -1, "num_train_epochs": 1, "count": 32},
        {"max_steps": -1, "num_train_epochs": 1, "count": 16},
    ),
}


@dataclass
class WithOwn(TrainingArguments):
    cache: str = ""


def differ(rank: Rank) -> list[str]:
    found = []
    with launched(rank):
        for options in DIFFERING.values():
            with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is compared below
                trainer_of(True, llama(), rank.scratch, **options[rank.number]).train()
            found.append(str(caught.value))
        with pytest.raises(ValueError, match=r"train\(resume_from_checkpoint\) \(rank 0: true; rank 1: null\)"):
            trainer_of(True, llama(), rank.scratch).train(resume_from_checkpoint=[True, None][rank.number])
        own = {"seed": rank.number, "data_seed": 7, "run_name": str(rank.number), "dataloader_num_workers": 0, "report_to": []}
        trainer = trainer_of(True, llama(), rank.scratch / str(rank.number), **own, max_steps=1)
        trainer.args.__class__ = WithOwn
        trainer.args.cache = f"/disk/of/host/{rank.number}"
        trainer.train()
    return found


def save_alone(rank: Rank) -> None:
    with launched(rank):
        trainer = trainer_of(True, llama(), rank.scratch)
        with pytest.raises(ValueError, match=r"^ranks are not at the same point: rank 0: save_pretrained; rank 1: evaluate"):
            trainer.evaluate() if rank.number else trainer.save_model(rank.scratch / "files")
        trainer.evaluate()


def test_a_rank_that_saves_alone_is_told_so_on_all_ranks() -> None:
    on_ranks(2, save_alone)


@pytest.mark.slow
def test_train_refuses_ranks_whose_arguments_or_steps_differ() -> None:
    first, second = on_ranks(2, differ)
    assert first == second, "it is one error"
    for said, expected in zip(first, DIFFERING, strict=True):
        assert re.match(f"ranks differ in (the )?{expected}", said), said


def leave_alone(rank: Rank) -> None:
    policy = zero3.ShardingPolicy(ignored=lambda name, info: "norm" in name)
    with (
        launched(rank),
        pytest.raises(ValueError, match=r"rank 0: ShardingPolicy\(ignored=.*leaves 7 parameters alone that train: .*norm.*Freeze them"),
    ):
        trainer_of(True, llama(), rank.scratch, policy=policy)


def test_a_trainer_refuses_ignored_parameters_that_train() -> None:
    on_ranks(2, leave_alone)
