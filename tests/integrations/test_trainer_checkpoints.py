"""Checkpoints of a Trainer over a sharded model: what is in them, resuming on other numbers of ranks, and broken ones."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import MODELS, gpt2, launched, llama, logged, trainer_of

pytestmark = pytest.mark.slow

SAVING = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
MASTERS = "Llama in bf16, over masters in fp32"
Logs = list[tuple[float, ...]]


def run(rank: Rank, name: str, directory: str, resume: Any = None, **options: Any) -> Logs:
    """The same examples in each step, whatever the number of ranks."""
    torch.manual_seed(rank.number)
    options = {**SAVING, "per_device_train_batch_size": 4 // rank.world_size, **options}
    model = llama().to(torch.bfloat16) if name == MASTERS else MODELS[name]()
    if name == MASTERS:
        options["policy"] = zero3.ShardingPolicy(master_dtype=torch.float32)
    trainer = trainer_of(True, model, directory, **options)
    trainer.train(resume_from_checkpoint=resume)
    return logged(trainer, "loss", "grad_norm")


def several(rank: Rank, name: str, runs: list[tuple[str, Any]]) -> list[Logs]:
    with launched(rank):
        return [run(rank, name, directory, resume) for directory, resume in runs]


@pytest.mark.parametrize("name", ["Llama", "LoRA"])
def test_a_checkpoint_is_resumed_on_other_numbers_of_ranks(name: str, tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    straight, again = on_ranks(2, several, name, [(str(two), None), (str(tmp_path / "a"), str(two / "checkpoint-3"))])[0]
    assert len(straight) == 6 and again == straight, "on as many ranks it is the same run, bit by bit"
    alone, fewer = on_ranks(1, several, name, [(str(one), None), (str(tmp_path / "b"), str(two / "checkpoint-3"))])[0]
    (more,) = on_ranks(2, several, name, [(str(tmp_path / "c"), str(one / "checkpoint-3"))])[0]
    for found in (alone, fewer, more):
        assert np.allclose(found, straight, rtol=1e-4, atol=0)


def test_masters_come_back_to_the_bit_and_models_stay_in_their_own_dtype(tmp_path: Path) -> None:
    first = tmp_path / "first"
    straight, again = on_ranks(2, several, MASTERS, [(str(first), None), (str(tmp_path / "again"), str(first / "checkpoint-3"))])[0]
    assert len(straight) == 6 and again == straight
    with safe_open(first / "checkpoint-6" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in llama().state_dict()} == {torch.bfloat16}


def with_dropout(rank: Rank, directory: str) -> tuple[Logs, Logs]:
    with launched(rank):
        MODELS["GPT-2"] = lambda: gpt2(resid_pdrop=0.3)
        return run(rank, "GPT-2", directory), run(rank, "GPT-2", f"{directory}/other", f"{directory}/checkpoint-3", weight_decay=0.0)


def test_a_resumed_run_draws_the_same_dropout_and_decays_weights_as_before(tmp_path: Path) -> None:
    """As with the stock Trainer, the options in the checkpoint count."""
    for straight, resumed in on_ranks(2, with_dropout, str(tmp_path)):
        assert straight == resumed


# -- what is in one


def save(rank: Rank, directory: str) -> None:
    with launched(rank):
        for name in ("Llama", "LoRA"):
            run(rank, name, f"{directory}/{name}", max_steps=3)


def tensors_in(directory: Path) -> dict[str, list[str]]:
    found = {}
    for path in directory.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found[path.relative_to(directory).as_posix()] = list(file.keys())
    return found


def test_a_checkpoint_holds_the_weights_once_and_frozen_ones_never(tmp_path: Path) -> None:
    on_ranks(2, save, str(tmp_path))
    full, adapters = tmp_path / "Llama" / "checkpoint-3", tmp_path / "LoRA" / "checkpoint-3"
    ours = [name for file, names in tensors_in(full).items() if file.startswith("zero3/") for name in names]
    assert any(name.startswith("state:") for name in ours) and not any(name.startswith("parameter:") for name in ours)
    assert set(tensors_in(full)["model.safetensors"]) == set(llama().state_dict())
    AutoModelForCausalLM.from_pretrained(full)
    held = [name for names in tensors_in(adapters).values() for name in names if "parameter:" in name or "base_model" in name]
    assert held and all("lora" in name for name in held)
    assert not (adapters / "model.safetensors").exists()
    peft.PeftModel.from_pretrained(llama(), adapters)


# -- broken ones


def flip(path: Path, place: int = -5) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def of_optimizer(checkpoint: Path) -> Path:
    return next(checkpoint.glob("zero3/data-*/optimizer-00001*"))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "model.safetensors": lambda checkpoint: flip(checkpoint / "model.safetensors"),
    "optimizer-00001": lambda checkpoint: flip(of_optimizer(checkpoint)),
    "optimizer-00001 ": lambda checkpoint: cut(of_optimizer(checkpoint)),
    "trainer_state.json": lambda checkpoint: cut(checkpoint / "trainer_state.json"),
    "no optimizer state": lambda checkpoint: shutil.rmtree(checkpoint / "zero3"),
    "model.safetensors has None bytes": lambda checkpoint: (checkpoint / "model.safetensors").unlink(),
    "manifest.json": lambda checkpoint: (checkpoint / "zero3" / "manifest.json").unlink(),
    "rng_state_1.pth is missing": lambda checkpoint: (checkpoint / "rng_state_1.pth").unlink(),
    "rng_state_0.pth": lambda checkpoint: cut(checkpoint / "rng_state_0.pth"),
    "rng_state_1.pth was changed": lambda checkpoint: flip(checkpoint / "rng_state_1.pth", 2000),
}


def resume_broken(rank: Rank, directory: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with launched(rank):
        found["straight"] = run(rank, "Llama", directory)
        for number, (name, damage) in enumerate(DAMAGES.items()):
            copy = Path(f"{directory}-{number}")
            if rank.number == 0:
                shutil.copytree(directory, copy)
                damage(copy / "checkpoint-6")
            torch.distributed.barrier()
            with pytest.raises(ValueError, match=r"^rank \d") as caught:
                run(rank, "Llama", str(copy), str(copy / "checkpoint-6"))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                logs = run(rank, "Llama", str(copy), True, save_strategy="no")
            found[name] = str(caught.value), [str(each.message) for each in told if "passes over" in str(each.message)], logs
    return found


def test_a_broken_newest_checkpoint_is_passed_over_with_a_warning(tmp_path: Path) -> None:
    """And raises where it is asked for by its path."""
    for found in on_ranks(2, resume_broken, str(tmp_path / "run")):
        straight = found.pop("straight")
        assert set(found) == set(DAMAGES)
        for name, (error, told, logs) in found.items():
            assert name.strip() in error and "checkpoint-6" in error, error
            assert len(told) == 1 and "checkpoint-6" in told[0] and name.strip() in told[0], told
            assert logs == straight, name


def without_whole_ones(rank: Rank, directory: str) -> tuple[str, str]:
    with launched(rank):
        with pytest.raises(ValueError, match="No valid checkpoint") as none:
            run(rank, "Llama", directory, True)
        run(rank, "Llama", directory, save_only_model=True)
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match=r"no checkpoint in .* is whole.*save_only_model") as caught:
            run(rank, "Llama", directory, True)
    return str(none.value), str(caught.value)


def test_weights_without_optimizer_state_are_not_resumed_in_silence(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for _, error in on_ranks(2, without_whole_ones, str(tmp_path / "run")):
        assert "checkpoint-3" in error and "checkpoint-6" in error


def resume_with_another_optimizer(rank: Rank, directory: str) -> None:
    with launched(rank):
        run(rank, "Llama", directory)
        trainer = trainer_of(True, llama(), directory, **SAVING, optim="sgd")
        before = zero3.full_state_dict(trainer.model)
        with pytest.raises(ValueError, match=r"the optimizer's state does not fit; nothing was loaded.*SGD"):
            trainer.train(resume_from_checkpoint=True)
        after = zero3.full_state_dict(trainer.model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_train_that_can_not_resume_the_optimizer_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    on_ranks(2, resume_with_another_optimizer, str(tmp_path / "run"))


def resume_apart(rank: Rank, directory: str) -> tuple[Logs, Logs]:
    """Each rank has a directory of its own."""
    own = f"{directory}-{rank.number}"
    with launched(rank):
        straight = run(rank, "Llama", directory)
        shutil.copytree(directory, own)
        if rank.number:
            cut(Path(own) / "checkpoint-6" / "trainer_state.json")
        warnings.simplefilter("ignore")
        resumed = run(rank, "Llama", own, True, save_strategy="no")
        torch.distributed.barrier()
        if rank.number:
            shutil.rmtree(f"{own}/checkpoint-6")
        with pytest.raises(ValueError, match=r"^ranks differ in the checkpoints that they see.*rank 1: \[\"checkpoint-3\"\].*file system"):
            run(rank, "Llama", own, True)
        # a path of each rank's own, as on a disk of each host's: what counts is the step
        assert run(rank, "Llama", own, f"{own}/checkpoint-3", save_strategy="no") == straight
        with pytest.raises(
            ValueError, match=r"^ranks differ in the step that they go on from: resume_from_checkpoint \(rank 0: 3; rank 1: 6\)"
        ):
            run(rank, "Llama", directory, f"{directory}/checkpoint-{(rank.number + 1) * 3}")
    return straight, resumed


def test_ranks_that_see_other_checkpoints_are_told_so(tmp_path: Path) -> None:
    """One that is broken on one rank is passed over on all."""
    for straight, resumed in on_ranks(2, resume_apart, str(tmp_path / "run")):
        assert resumed == straight


def save_without_weights(rank: Rank) -> None:
    model = zero3.shard(llama())
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model))
    sum(chunk.sum() for chunk in zero3.get_trainable_chunk(model)).backward()
    optimizer.step()
    path = rank.scratch / "apart"
    zero3.save_checkpoint(path, model, optimizer, weights=False, extra=3)
    before = zero3.full_state_dict(model)
    optimizer.step()
    moved = zero3.full_state_dict(model)
    state = zero3.full_optimizer_state_dict(model, optimizer)
    with pytest.raises(ValueError, match=r"was saved without weights, and these are trained here: model\.embed_tokens\.weight"):
        zero3.load_checkpoint(path, model, optimizer)
    assert zero3.load_checkpoint(path, model, optimizer, weights=False) == 3
    again = zero3.full_state_dict(model)
    assert all(torch.equal(again[name], value) and not torch.equal(value, before[name]) for name, value in moved.items())
    loaded = zero3.full_optimizer_state_dict(model, optimizer)
    for name, values in state.get("state", {}).items():
        assert values["step"] == 2 and loaded["state"][name]["step"] == 1


def test_save_checkpoint_without_weights_is_loaded_without_them() -> None:
    on_ranks(2, save_without_weights)
