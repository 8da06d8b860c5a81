"""accelerate's loop over sharded models gives what it gives under DistributedDataParallel; its states move between numbers of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero3
from tests.support.processes import Rank, on_ranks
from tests.support.reference import assert_close
from tests.support.trainers import collate, launched, llama, rows

pytestmark = pytest.mark.slow


def accelerator_of(ours: bool, **options: Any) -> Any:
    from accelerate import Accelerator

    from zero3.integrations.accelerate import Zero3Accelerator

    return (Zero3Accelerator if ours else Accelerator)(cpu=True, **options)


class Job:
    """A model, its optimizer in two groups, a schedule and examples, prepared."""

    def __init__(self, rank: Rank, ours: bool, models: int = 1, rates: int = 100, **options: Any) -> None:
        self.accelerator = accelerator_of(ours, gradient_accumulation_steps=2, **options)
        self.models, self.optimizers = [], []
        for number in range(models):
            model = llama()
            torch.manual_seed(number)
            nn.init.normal_(model.lm_head.weight, std=0.1)
            norms = [p for name, p in model.named_parameters() if "norm" in name]
            rest = [p for name, p in model.named_parameters() if "norm" not in name]
            optimizer = torch.optim.AdamW([{"params": rest, "weight_decay": 0.3}, {"params": norms, "lr": 1e-3}], lr=1e-2)
            model, optimizer = self.accelerator.prepare(model, optimizer)
            self.models.append(model)
            self.optimizers.append(optimizer)
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0].optimizer, rates, 0.5)  # it steps once for each rank
        loader = torch.utils.data.DataLoader(rows(24, length=8), batch_size=4 // rank.world_size, collate_fn=collate, shuffle=False)  # type: ignore[arg-type, var-annotated]
        self.schedule, self.loader = self.accelerator.prepare(schedule, loader)

    def run(self, begin: int, end: int) -> list[list[float]]:
        """Micro-batches `begin` to `end`: the losses over all ranks, and norms."""
        found = []
        batches = list(self.loader)
        for number in range(begin, end):
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                with self.accelerator.accumulate(model) if model is self.models[0] else _as_it_is():
                    loss = model(**batches[number % len(batches)]).loss
                    self.accelerator.backward(loss)
                    norm = torch.zeros(())
                    if self.accelerator.sync_gradients:
                        norm = self.accelerator.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    if model is self.models[0]:
                        self.schedule.step()
                    optimizer.zero_grad()
                found.append([self.accelerator.gather(loss.detach().reshape(1)).mean().item(), float(norm)])
        return found


class _as_it_is:
    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


def loop(rank: Rank, ours: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
    with launched(rank):
        job = Job(rank, ours, rates=2)
        found = job.run(0, 6)
        return found, {name: value.clone() for name, value in job.accelerator.get_state_dict(job.models[0]).items()}


def test_an_accelerator_gives_what_it_gives_under_ddp() -> None:
    expected, weights = on_ranks(2, loop, False, debug="OFF")[0]
    (found, saved), (_, nothing) = on_ranks(2, loop, True)
    assert np.allclose(found, expected, rtol=1e-5)
    assert nothing == {} and saved.keys() == weights.keys()
    assert_close(saved, weights, 1e-4, "weights")


# -- states


def straight(rank: Rank, directory: str, models: int) -> list[list[float]]:
    with launched(rank):
        job = Job(rank, True, models)
        job.run(0, 3)  # in the middle of an accumulation
        job.accelerator.save_state(directory)
        return job.run(3, 6)


def resumed(rank: Rank, directory: str, models: int, other: str | None = None) -> list[list[float]]:
    with launched(rank):
        job = Job(rank, True, models)
        job.accelerator.load_state(directory)
        if other is not None:
            job.accelerator.save_state(other)
        return job.run(3, 6)


@pytest.mark.parametrize("models", [1, 2])
def test_save_state_and_load_state_at_other_numbers_of_ranks(models: int, tmp_path: Path) -> None:
    """The half of a gradient that was there when it was saved is not in it, as with accelerate's own."""
    two, one = str(tmp_path / "two"), str(tmp_path / "one")
    on_ranks(2, straight, two, models)
    expected = on_ranks(2, resumed, two, models)[0]
    fewer = on_ranks(1, resumed, two, models, one)[0]
    more = on_ranks(2, resumed, one, models)
    assert np.allclose(fewer, expected, rtol=1e-5) and np.allclose(more[0], expected, rtol=1e-5)
    assert all(any(norm > 0 for _, norm in found) for found in (expected, fewer, *more)), "ranks step in the same micro-batches"


def states(rank: Rank) -> None:
    with launched(rank):
        job = Job(rank, True)
        seen: list[Any] = []
        job.accelerator.register_save_state_pre_hook(lambda models, weights, directory: seen.append((len(models), list(weights))))
        job.accelerator.save_state(str(rank.scratch / "state"))
        assert seen == [(1, [])], "a hook of the user's sees the model"
        assert not list((rank.scratch / "state").glob("*.safetensors")) and (rank.scratch / "state" / "zero3" / "manifest.json").is_file()
        job.accelerator.save_model(job.models[0], rank.scratch / "model")
        assert (rank.scratch / "model" / "model.safetensors").is_file()
        assert job.accelerator.unwrap_model(job.models[0]) is job.models[0]
        assert job.accelerator._optimizers == job.optimizers


def test_hooks_and_files_of_a_state() -> None:
    on_ranks(2, states)


# -- accumulation


@pytest.mark.parametrize("sync_each_batch", [True, False])
def test_accumulate_keeps_whole_gradients_by_choice_only(sync_each_batch: bool) -> None:
    assert on_ranks(2, accumulated, sync_each_batch) == [[not sync_each_batch, False]] * 2


def accumulated(rank: Rank, sync_each_batch: bool) -> list[bool]:
    with launched(rank):
        job = Job(rank, True, sync_each_batch=sync_each_batch)
        waiting = []
        for batch in list(job.loader)[:2]:
            with job.accelerator.accumulate(job.models[0]):
                job.accelerator.backward(job.models[0](**batch).loss)
            chunks = zero3.get_trainable_chunk(job.models[0])
            waiting.append(all(type(chunk.grad).__name__ == "DeferredGradient" for chunk in chunks if chunk.numel()))
        return waiting


# -- fp16


def in_fp16(rank: Rank, low: bool) -> tuple[list[float], list[bool], list[str]]:
    """On the CPU, which computes in fp16 if it has to. The first gradients overflow at this scale."""
    import zero3.integrations.accelerate as module

    check, module._check = module._check, lambda *arguments: None
    try:
        with launched(rank):
            accelerator = accelerator_of(True, mixed_precision="fp16" if low else "no")
            if low:
                accelerator.native_amp, accelerator.scaler = True, zero3.GradScaler("cpu", init_scale=2.0**22)
            model = llama()
            model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
            batches = [collate(rows(2, seed=rank.number, length=8))] * 12
            found, skipped = [], []
            for batch in batches:
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                skipped.append(accelerator.optimizer_step_was_skipped)
                if not skipped[-1]:
                    found.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
                optimizer.zero_grad()
            return found, skipped, sorted({str(chunk.dtype) for chunk in model.parameters()})
    finally:
        module._check = check


def test_fp16_scales_losses_over_fp32_masters_and_skips_steps_together() -> None:
    (found, skipped, dtypes), (_, others, _) = on_ranks(2, in_fp16, True)
    expected, none, _ = on_ranks(2, in_fp16, False)[0]
    assert dtypes == ["torch.float32"] and not any(none)
    assert skipped == others and 0 < sum(skipped) < 8
    assert np.allclose(found, expected[: len(found)], rtol=5e-3) and found != expected[: len(found)]


class Unmakeable(torch.optim.SGD):
    def __init__(self, parameters: Any, secret: object) -> None:
        super().__init__(parameters, lr=0.1)


def over_a_part(rank: Rank, ours: bool) -> list[float]:
    """The optimizer has a part of what requires gradients; the norm is of all."""
    with launched(rank):
        accelerator, model = accelerator_of(ours), llama()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.model.layers.parameters(), lr=1e-2))
        found = []
        for step in range(3):
            loss = model(**collate(rows(2, seed=step, length=8))).loss
            accelerator.backward(loss)
            found += [loss.item(), float(accelerator.clip_grad_norm_(model.parameters(), 1.0))]
            optimizer.step()
            model.zero_grad()
        return found


def test_gradients_of_what_no_optimizer_has_count_in_norms() -> None:
    expected = on_ranks(2, over_a_part, False, debug="OFF")[0]
    assert np.allclose(on_ranks(2, over_a_part, True)[0], expected, rtol=1e-4)


# -- parameters that the policy leaves alone


def left_alone(rank: Rank, ours: bool) -> tuple[list[list[float]], bool]:
    """Frozen ones, in a group of the optimizer."""
    policy = {"policy": zero3.ShardingPolicy(ignored=lambda name, info: "norm" in name)} if ours else {}
    with launched(rank):
        accelerator, model = accelerator_of(ours, **policy), llama()
        norms = [p.requires_grad_(False) for name, p in model.named_parameters() if "norm" in name]
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = []
        for number in range(3):
            loss = model(**collate(rows(2, seed=2 * number + rank.number, length=8))).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            found.append([accelerator.gather(loss.detach().reshape(1)).mean().item(), float(norm)])
        accelerator.save_state(str(rank.scratch / "state"))
        accelerator.wait_for_everyone()
        accelerator.load_state(str(rank.scratch / "state"))
    return found, all(id(parameter) in held for parameter in norms)


def test_ignored_parameters_that_are_frozen_stay_in_their_group() -> None:
    expected, held = on_ranks(2, left_alone, False, debug="OFF")[0]
    found, kept = on_ranks(2, left_alone, True)[0]
    assert np.allclose(found, expected, rtol=1e-5) and held and kept


def refuse_ignored(rank: Rank) -> None:
    policy = zero3.ShardingPolicy(ignored=lambda name, info: "norm" in name)
    with launched(rank):
        accelerator, model = accelerator_of(True, policy=policy), llama()
        with pytest.raises(
            ValueError, match=r"rank 0: ShardingPolicy\(ignored=.*leaves 7 parameters alone that train: .*norm.*Freeze them"
        ):
            accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        sharded = zero3.shard(llama(), policy=policy)
        with pytest.raises(ValueError, match="leaves 7 parameters alone that train"):
            accelerator.prepare(torch.optim.AdamW(sharded.parameters()), sharded)


def test_an_accelerator_refuses_ignored_parameters_that_train() -> None:
    on_ranks(2, refuse_ignored)


# -- refusals


def differ(rank: Rank) -> None:
    with launched(rank):
        accelerator = accelerator_of(True, gradient_accumulation_steps=1 + rank.number)
        with pytest.raises(
            ValueError, match=r"^ranks differ in the options of Zero3Accelerator: gradient_accumulation_steps \(rank 0: 1; rank 1: 2"
        ):
            accelerator.prepare(llama())


def test_prepare_refuses_accelerators_whose_options_differ() -> None:
    on_ranks(2, differ)


def load_half(rank: Rank, directory: str) -> None:
    with launched(rank):
        job = Job(rank, True)
        job.accelerator.save_state(directory)
        torch.distributed.barrier()
        job.run(0, 2)
        before = job.accelerator.get_state_dict(job.models[0])
        if rank.number == 0:
            (Path(directory) / "scheduler.bin").unlink()
        torch.distributed.barrier()
        with pytest.raises(ValueError, match=r"rank 0: .* has no scheduler\.bin; nothing was loaded"):
            job.accelerator.load_state(directory)
        after = job.accelerator.get_state_dict(job.models[0])
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_load_state_without_a_file_changes_nothing(tmp_path: Path) -> None:
    on_ranks(2, load_half, str(tmp_path / "state"))


def refused(rank: Rank) -> None:
    with launched(rank):
        accelerator = accelerator_of(True)
        with pytest.raises(ValueError, match=r"no ModuleList.*zero3\.shard"):
            accelerator.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        model = llama()
        apart = torch.optim.AdamW(model.parameters())
        with pytest.raises(ValueError, match=r"the AdamW holds .*no sharded model trains.*one call of prepare\(\).*zero3\.shard"):
            accelerator.prepare(apart)
        stepped = torch.optim.AdamW(model.parameters())
        if rank.number:  # all ranks raise what one has done
            model(**collate(rows(2))).loss.backward()
            stepped.step()
        with pytest.raises(ValueError, match=r"^rank 1: the AdamW has made steps already"):
            accelerator.prepare(model, stepped)
        with pytest.raises(ValueError, match=r"the Unmakeable can't be tried out .*zero3\.get_trainable_chunk\(model\)"):
            accelerator.prepare(model, Unmakeable(model.parameters(), object()))
        assert not zero3.is_sharded(model)
        with pytest.raises(ValueError, match=r"LBFGS .* does more than treat each element by itself"):
            accelerator.prepare(other := llama(), torch.optim.LBFGS(other.parameters()))
        with pytest.raises(ValueError, match=r"LBFGS .* does more than treat each element by itself"):
            accelerator.prepare(other := llama(), torch.optim.LBFGS(other.model.layers.parameters()))
        model = accelerator.prepare(model)
        mine = zero3.get_trainable_chunk(model) if rank.number == 0 else llama().parameters()
        with pytest.raises(ValueError, match=r"^rank 1: the SGD holds .*no sharded model trains"):
            accelerator.prepare_optimizer(torch.optim.SGD(mine))
        with pytest.raises(ValueError, match="takes all of a prepared model"):
            accelerator.clip_grad_norm_(zero3.get_trainable_chunk(model)[:1], 1.0)
        with pytest.raises(RuntimeError, match=r"would wait for ranks that have no data: .*zero3\.joinable"):
            accelerator.join_uneven_inputs([model])
        with pytest.raises(RuntimeError, match=r"knows DistributedDataParallel alone: call zero3\.reduce_gradients\(model\) after"):
            accelerator.trigger_sync_in_backward(model)
        with accelerator.trigger_sync_in_backward(nn.Linear(2, 2)):
            pass
        for options, text in (({"mixed_precision": "fp16"}, "fp16 on the device cpu"), ({"mixed_precision": "fp8"}, "fp8")):
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state()
            with pytest.raises((ValueError, ImportError), match=text):
                accelerator_of(True, **options)


def test_what_an_accelerator_refuses() -> None:
    on_ranks(2, refused)


def save_alone(rank: Rank) -> None:
    """As examples for DDP do: the main process saves, and the others wait for it."""
    with launched(rank):
        accelerator = accelerator_of(True)
        model = accelerator.prepare(llama())
        for save in (
            accelerator.get_state_dict,
            lambda model: accelerator.save_model(model, rank.scratch / "files"),
            lambda _: accelerator.save_state(str(rank.scratch / "state")),
        ):
            with pytest.raises(ValueError, match=r"^ranks are not at the same point: rank 0: (save|full)_\w+; rank 1: wait_for_everyone"):  # noqa: PT012 - one of two
                if accelerator.is_main_process:
                    save(model)
                accelerator.wait_for_everyone()
        accelerator.wait_for_everyone()


def test_a_rank_that_saves_alone_is_told_so_on_all_ranks() -> None:
    on_ranks(2, save_alone)
