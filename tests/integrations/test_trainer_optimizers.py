"""Optimizers that the Trainer would make, and that can't have chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

import zero3
from tests.support.offloaded import in_files
from tests.support.optimizers import MuonAndAdamW
from tests.support.processes import Rank, on_ranks
from tests.support.trainers import launched, llama, logged, trainer_of


def same_losses_in_files(rank: Rank) -> None:
    """The trainer offloads its optimizer when the policy offloads chunks."""
    with launched(rank):
        losses = []
        for place in (None, rank.scratch):
            trainer = trainer_of(True, llama(), rank.scratch / str(place is None), policy=zero3.ShardingPolicy(offload=place), max_steps=3)
            trainer.train()
            losses.append(logged(trainer, "loss", "grad_norm"))
        assert losses[0] == losses[1] and len(losses[0]) > 1
        state = trainer.optimizer.optimizer.state.values()
        assert in_files([value for kept in state for value in kept.values() if value.ndim])


@pytest.mark.slow
def test_offload_gives_the_same_losses() -> None:
    on_ranks(2, same_losses_in_files)


# Every name of transformers' `OptimizerNames`.
TRIED = "adamw_torch adamw_torch_fused adafactor sgd adagrad rmsprop"
LOW_BIT = "adamw_torch_4bit adamw_torch_8bit adamw_bnb_8bit adamw_8bit lion_8bit paged_adamw_8bit rmsprop_bnb_8bit"  # test_low_bit.py
LOW_BIT += " lion_32bit paged_adamw_32bit paged_lion_32bit rmsprop_bnb rmsprop_bnb_32bit paged_lion_8bit"
LOW_BIT += " ademamix ademamix_8bit paged_ademamix_32bit paged_ademamix_8bit"
LOW_BIT += " schedule_free_radam schedule_free_adamw schedule_free_sgd stable_adamw grokadamw"
DIVIDE = "galore_adamw galore_adamw_8bit galore_adafactor galore_adamw_layerwise galore_adamw_8bit_layerwise galore_adafactor_layerwise"
DIVIDE += " lomo adalomo apollo_adamw apollo_adamw_layerwise"
NOT_HERE = "adamw_anyprecision adamw_torch_xla adamw_torch_npu_fused"  # of a library that is no package, and of devices


def test_every_name_of_transformers_is_told_of() -> None:
    import transformers
    from transformers.training_args import OptimizerNames

    told = " ".join([TRIED, LOW_BIT, DIVIDE, NOT_HERE]).split()
    found = sorted(name.value for name in OptimizerNames)
    older = Version(transformers.__version__) < Version("5.23")
    assert sorted(told) == found or (older and set(found) - set(told) <= {"adamw_apex_fused"})


def losses_by_name(rank: Rank, ours: bool) -> dict[str, Any]:
    found = {}
    with launched(rank):
        for name in TRIED.split():
            trainer = trainer_of(ours, llama(), rank.scratch / name, optim=name, max_steps=3)
            trainer.train()
            found[name] = logged(trainer, "loss", "grad_norm")
    return found


@pytest.mark.slow
def test_the_trainers_names_give_what_they_give_under_ddp() -> None:
    """Adafactor too: it gets whole parameters."""
    expected, found = on_ranks(2, losses_by_name, False, debug="OFF")[0], on_ranks(2, losses_by_name, True)[0]
    for name in TRIED.split():
        assert len(expected[name]) == 3 and np.allclose(found[name], expected[name], rtol=1e-4), name


def made_by_a_factory(rank: Rank, ours: bool) -> Any:
    with launched(rank):
        losses = []
        for steps in (3, 5) if ours else (5,):  # ours is resumed: the list of both is saved and loaded
            trainer = trainer_of(
                ours,
                llama(),
                rank.scratch,
                max_steps=steps,
                save_steps=3,
                save_strategy="steps" if ours else "no",
                lr_scheduler_type="constant",
            )
            trainer.optimizer_cls_and_kwargs = MuonAndAdamW, {"lr": 0.01}
            trainer.train(resume_from_checkpoint=steps == 5 and ours)
            losses = logged(trainer, "loss", "grad_norm")
        assert not ours or isinstance(trainer.optimizer.optimizer, zero3.OptimizerList)
        return losses


@pytest.mark.slow
def test_a_factory_is_called_with_the_sharded_model() -> None:
    expected, found = on_ranks(2, made_by_a_factory, False, debug="OFF")[0], on_ranks(2, made_by_a_factory, True)[0]
    assert len(expected) == 5 and np.allclose(found, expected, rtol=1e-3)


def refuse_by_name(rank: Rank) -> None:
    def over_chunks(model: Any, **options: Any) -> Any:
        named = list(model.named_parameters())
        return torch.optim.AdamW([{"params": [p for _, p in named if p.ndim > 1]}, {"params": [p for _, p in named if p.ndim < 2]}])

    with launched(rank):
        for name in DIVIDE.split():
            with pytest.raises(
                ValueError, match=rf'^optim=\'{name}\': .*zero3\.param_groups\(model, lambda name, info: {{"whole": True}}\)'
            ):
                trainer_of(True, llama(), rank.scratch, optim=name).create_optimizer()
        for made, says in (
            ((lambda: over_chunks, {}), "optimizer_cls_and_kwargs=.*group 0 of the AdamW .* is empty"),
            (
                (torch.optim.Muon, {"lr": 0.1}),
                r"Muon does not take .* of the model's parameters: .*norm.*zero3\.OptimizerList\(muon, adamw\)",
            ),
        ):
            trainer = trainer_of(True, llama(), rank.scratch)
            trainer.optimizer_cls_and_kwargs = made
            with pytest.raises(ValueError, match=says):
                trainer.create_optimizer()


def test_what_divides_parameters_itself_is_refused_by_name() -> None:
    on_ranks(1, refuse_by_name)


class Normed(torch.optim.SGD):
    """Divides each gradient by its norm, if it was made so: what decides is in no group."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, *, normed: bool = False, **options: Any) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)
        self.normed = normed

    def step(self, closure: Any = None) -> None:
        for parameter in (parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None):
            if self.normed and parameter.numel():
                parameter.grad = parameter.grad / parameter.grad.norm().clamp(min=1e-6)
        super().step()


def in_whole_parameters(rank: Rank, ours: bool, how: str) -> Any:
    """Losses, with a class that is exact on whole parameters alone: the trainer makes it, or is given it, or accelerate."""
    from accelerate import Accelerator

    from zero3.integrations.accelerate import Zero3Accelerator

    with launched(rank):
        model = llama()
        if "accelerate" in how:
            accelerator = (Zero3Accelerator if ours else Accelerator)(cpu=True)
            optimizer: Any = Normed(model.parameters(), lr=0.1, normed=True)
            if "list" in how:
                both = MuonAndAdamW()(model, lr=0.01)
                optimizer = zero3.OptimizerList(*both.members) if ours else both
            model, optimizer = accelerator.prepare(model, optimizer)
            losses = []
            for step in range(3):
                ids = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(10 * step + rank.number))
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            return losses
        given = {"optimizers": (Normed(model.parameters(), lr=0.1, normed=True), None)} if how == "given" else {}
        trainer = trainer_of(ours, model, rank.scratch, max_steps=3, **given)
        if how == "made":
            trainer.optimizer_cls_and_kwargs = Normed, {"lr": 0.1, "normed": True}
        trainer.train()
        return logged(trainer, "loss", "grad_norm")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["made", "given", "accelerate", "a list for accelerate"])
def test_an_optimizer_gets_whole_parameters_where_it_needs_them(how: str) -> None:
    """Also if what it does is decided by an argument that is in no group."""
    expected, found = on_ranks(2, in_whole_parameters, False, how, debug="OFF")[0], on_ranks(2, in_whole_parameters, True, how)[0]
    assert len(expected) == 3 and np.allclose(found, expected, rtol=1e-3 if "list" in how else 1e-4)


def whole(rank: Rank, ours: bool) -> Any:
    """What the refusal says."""
    with launched(rank):
        model = llama()
        if ours:
            groups: Any = zero3.param_groups(zero3.shard(model), lambda name, info: {"whole": True})
        else:
            groups = model.parameters()
        optimizer = Normed(groups, lr=0.01, normed=True)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        trainer = trainer_of(ours, model, rank.scratch, optimizers=(optimizer, schedule), max_steps=3)
        trainer.train()
        return logged(trainer, "loss", "grad_norm")


def test_an_optimizer_of_whole_parameters_is_passed_to_the_trainer() -> None:
    expected, found = on_ranks(2, whole, False, debug="OFF")[0], on_ranks(2, whole, True)[0]
    assert len(expected) == 3 and np.allclose(found, expected, rtol=1e-5)
