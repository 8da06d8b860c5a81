"""Zero3Trainer makes a causal model's loss without logits, and divides sequences over ranks (sequence_parallel)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import zero3
from tests.integrations.test_trainer_batches import tighten
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import launched, llama, logged, lora, trainer_of


def dims_of_logits(rank: Rank, chunked_head: bool) -> set[int]:
    seen = []
    with launched(rank):
        trainer = trainer_of(True, llama(), rank.scratch, max_steps=1, chunked_head=chunked_head)
        trainer.model.register_forward_hook(lambda model, args, output: seen.append(output.logits.dim()))
        trainer.train()
    return set(seen)


@pytest.mark.parametrize(("chunked_head", "dims"), [(True, 0), (False, 3)])
def test_a_trainer_makes_no_logits(chunked_head: bool, dims: int) -> None:
    assert on_ranks(1, dims_of_logits, chunked_head) == [{dims}]


BOTH: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "per_device_train_batch_size": 3, "max_steps": 4}


def train(rank: Rank, parts: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    with launched(rank):
        model, counts = {"llama": llama, "lora": lora}[name](), options.pop("counts", True)
        trainer = trainer_of(True, model, rank.scratch, **BOTH, **options, **({"sequence_parallel": parts} if parts > 1 else {}))
        if not counts:
            trainer.train_dataset = [{**row, "labels": [-100] * len(row["labels"])} for row in trainer.train_dataset]
        if options.get("auto_find_batch_size"):
            tighten(trainer.model, rank.number)
        trainer.train()
        predicted = trainer.predict(trainer.eval_dataset)
        return {
            "losses": logged(trainer, "loss"), "norms": logged(trainer, "grad_norm"), "evaluated": logged(trainer, "eval_loss"),
            "predicted": predicted.predictions, "labels": predicted.label_ids, "metric": predicted.metrics["test_loss"],
            "flos": trainer.state.total_flos, "epoch": trainer.state.epoch,
        }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"counts": False}),  # no token of any batch: steps of nothing
        pytest.param("lora", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"average_tokens_across_devices": False}, marks=pytest.mark.slow),
        pytest.param("llama", {"gradient_accumulation_steps": 1}, marks=pytest.mark.slow),
        pytest.param("llama", {"auto_find_batch_size": True}, marks=pytest.mark.slow),
    ],
)
def test_a_trainer_whose_ranks_share_sequences_gives_what_one_process_gives(name: str, options: dict[str, Any]) -> None:
    """Losses, norms, evaluation, and joined logits: of one group, one process' data."""
    (alone,) = on_ranks(1, train, 1, name, options)
    for found in on_ranks(2, train, 2, name, options):
        for key in ("losses", "norms", "evaluated"):
            assert np.allclose(found[key], alone[key], rtol=2e-5, atol=0), key
        assert found["metric"] == pytest.approx(alone["metric"], rel=1e-5)
        assert np.allclose(found["predicted"], alone["predicted"], atol=1e-4)
        assert np.array_equal(found["labels"], alone["labels"])
        assert found["epoch"] == alone["epoch"] and found["flos"] == pytest.approx(alone["flos"], rel=0.1)


def refused(rank: Rank) -> list[str]:
    from accelerate.parallelism_config import ParallelismConfig

    from zero3.integrations.accelerate import Zero3Accelerator

    told = []
    with launched(rank):
        for options in ({"label_smoothing_factor": 0.1}, {"include_num_input_tokens_seen": "all"}, {"sequence_parallel": 3}):
            with pytest.raises(ValueError, match="sequence_parallel") as error:
                trainer_of(True, llama(), rank.scratch, **{"sequence_parallel": 2, **options})
            told.append(str(error.value))
        for other in ({"cp_size": 2}, {"sp_size": 2, "sp_backend": "deepspeed"}):
            with pytest.raises(ValueError, match="sequence_parallel=2"):
                Zero3Accelerator(cpu=True, parallelism_config=ParallelismConfig(**other))
        with pytest.raises(ValueError, match="sequence_parallel"):
            Zero3Accelerator(cpu=True, sequence_parallel=2).shard(zero3.shard(llama()))
    return told


def test_what_needs_whole_sequences_is_refused_by_name() -> None:
    on_ranks(2, refused)


def loader(rank: Rank) -> list[list[int]]:
    from zero3.integrations.accelerate import Zero3Accelerator

    with launched(rank):
        accelerator = Zero3Accelerator(cpu=True, sequence_parallel=2)
        found = accelerator.prepare(torch.utils.data.DataLoader(list(range(8)), batch_size=2))
        assert accelerator.num_processes == 4 and accelerator.gather(torch.tensor([rank.number])).tolist() == [0, 1, 2, 3]
        return [each.tolist() for each in found]


@pytest.mark.slow
def test_an_accelerators_loaders_deal_over_groups() -> None:
    assert on_ranks(4, loader) == 2 * [[[0, 1], [4, 5]]] + 2 * [[[2, 3], [6, 7]]]
