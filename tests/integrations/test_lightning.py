"""Lightning's Trainer with our strategy, beside its own DDP on two processes; and the examples of the page."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

lightning = pytest.importorskip("lightning", reason="Lightning is not installed (pip install 'zero3[lightning]')")

from lightning.pytorch.callbacks import (  # noqa: E402
    BackboneFinetuning,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

import zero3  # noqa: E402
from tests.support.lightnings import Module, Net, launched, other_rows, train_rows, trainer  # noqa: E402
from tests.support.optimizers import MuonAndAdamW  # noqa: E402
from tests.support.processes import Rank, on_ranks, try_on_ranks  # noqa: E402
from zero3.integrations.lightning import Zero3FabricStrategy, Zero3Strategy  # noqa: E402

pytestmark = pytest.mark.slow
Seen = list[tuple[str, float]]


def assert_close(found: Seen, expected: Seen, tolerance: float = 2e-6) -> None:
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    assert [value for _, value in found] == pytest.approx([value for _, value in expected], abs=tolerance)


def fit(rank: Rank, kind: str, options: dict[str, Any]) -> tuple[Seen, list[Tensor]]:
    """Fits, with a validation in between, validates, tests, predicts."""
    with launched(rank):
        module = Module()
        made = trainer(rank, kind, rank.scratch, **{"max_epochs": 2, **options})
        made.fit(module, train_rows(), other_rows())
        made.validate(module, other_rows(), verbose=False)
        made.test(module, other_rows(), verbose=False)
        predicted = made.predict(module, other_rows())
        return module.seen, [value.detach() for value in predicted or ()]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms clipped": {"gradient_clip_val": 0.1},
    "values clipped": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulation": {"accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("name", CASES)
def test_the_trainer_beside_ddp(name: str) -> None:
    ours, theirs = (on_ranks(2, fit, kind, CASES[name], debug="OFF") for kind in ("zero3", "ddp"))
    for (seen, predicted), (expected, expected_predictions) in zip(ours, theirs, strict=True):
        assert_close(seen, expected)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(predicted, expected_predictions, strict=True))


class Listed(Module):
    """Muon for matrices, and AdamW for the rest."""

    def configure_optimizers(self) -> Any:
        made = MuonAndAdamW()(self, lr=0.02)
        return zero3.OptimizerList(*made) if zero3.is_sharded(self) else made


def fit_listed(rank: Rank, kind: str) -> Seen:
    with launched(rank):
        module = Listed()
        trainer(rank, kind, rank.scratch, max_epochs=1).fit(module, train_rows())
        return module.seen


def test_a_list_of_optimizers_beside_ddp() -> None:
    ours, theirs = (on_ranks(2, fit_listed, kind, debug="OFF") for kind in ("zero3", "ddp"))
    for seen, expected in zip(ours, theirs, strict=True):
        assert_close(seen, expected, 1e-3)


def test_bf16_beside_autocast() -> None:
    """Two ways of rounding: the losses stay together, and neither is float32's."""
    whole, ours, theirs = (
        on_ranks(2, fit, kind, {"precision": precision}, debug="OFF")[0][0]
        for kind, precision in (("zero3", "32-true"), ("zero3", "bf16-mixed"), ("ddp", "bf16-mixed"))
    )
    assert_close(ours, theirs, 3e-2)
    assert ours != whole


OF_SCALER = {"init_scale": 2.0**17, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}


def fit_scaled(rank: Rank, kind: str, enabled: bool) -> tuple[Seen, list[float]]:
    """The user's own scaler, through overflows, a validation and a second fit."""
    with launched(rank):
        scales: list[float] = []

        class Overflows(Module):
            def training_step(self, batch: Any, number: int) -> Tensor:
                loss = super().training_step(batch, number)
                return loss * float("inf") if enabled and rank.number and len(self.seen) in (3, 5) else loss

            def on_train_batch_end(self, *others: Any) -> None:
                scales.append(made.precision_plugin.scaler.get_scale())

        plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", enabled=enabled, **OF_SCALER))]
        made = trainer(rank, kind, rank.scratch, {"policy": zero3.ShardingPolicy()}, max_epochs=1, plugins=plugins, gradient_clip_val=0.1)
        module = Overflows()
        made.fit(module, train_rows())
        made.validate(module, other_rows(), verbose=False)
        made.fit_loop.max_epochs = 2
        made.fit(module, train_rows())
        return module.seen, scales


@pytest.mark.parametrize("enabled", [True, False])
def test_the_users_loss_scaler_keeps_its_options_and_its_scale(enabled: bool) -> None:
    ours, theirs = (on_ranks(2, fit_scaled, kind, enabled, debug="OFF") for kind in ("zero3", "ddp"))
    for (seen, scales), (expected, expected_scales) in zip(ours, theirs, strict=True):
        assert scales == expected_scales and len(set(scales)) == 1 + 2 * enabled
        assert_close(seen, expected, 1e-3)


def inside(rank: Rank, stored: torch.dtype) -> dict[str, Any]:
    """What a fit in bf16 leaves behind: dtypes, chunks, no autocast."""
    with launched(rank):
        found: dict[str, Any] = {}

        class Watching(Module):
            def training_step(self, batch: Any, number: int) -> Tensor:
                found["autocast"] = torch.is_autocast_enabled("cpu")
                inner: Any = next(m for m in self.net.blocks[0].modules() if isinstance(m, nn.Linear))
                inner.register_forward_hook(lambda linear, inputs, output: found.update(computes=linear.weight.dtype))
                return super().training_step(batch, number)

        module = Watching().to(stored)
        trainer(rank, "zero3", rank.scratch, max_steps=2, precision="bf16-mixed").fit(module, train_rows())
        chunks = zero3.get_trainable_chunk(module)
        elements = sum(parameter.numel() for parameter in Net().parameters())
        found |= {"masters": {chunk.dtype for chunk in chunks}, "share": sum(chunk.numel() for chunk in chunks) / elements}
        return found


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_bf16_is_a_policy(stored: torch.dtype) -> None:
    for found in on_ranks(2, inside, stored, debug="OFF"):
        assert not found["autocast"] and found["computes"] == torch.bfloat16
        assert found["masters"] == {torch.float32} and 0.5 <= found["share"] < 0.55


def save_halfway(rank: Rank, directory: str) -> tuple[Seen, str]:
    """Two epochs, a checkpoint after each. (In the middle of one Lightning would begin its data anew.)"""
    with launched(rank):
        module = Module()
        keeper = ModelCheckpoint(Path(directory) / "kept", every_n_train_steps=4, save_top_k=-1, filename="{step}")
        made = trainer(rank, "zero3", rank.scratch, max_steps=8, callbacks=[keeper], enable_checkpointing=True)
        made.fit(module, train_rows(4 if rank.world_size == 1 else 2))
        assert keeper.best_model_path.endswith("step=8.ckpt")
        return module.seen, str(Path(directory) / "kept" / "step=4.ckpt")


def resume(rank: Rank, path: str) -> Seen:
    with launched(rank):
        module = Module()
        for parameter in module.parameters():
            nn.init.zeros_(parameter.data)
        made = trainer(rank, "zero3", rank.scratch, max_steps=8)
        made.fit(module, train_rows(4 if rank.world_size == 1 else 2), ckpt_path=path)
        assert made.global_step == 8
        return module.seen


def losses_of_all(ranks: list[Seen]) -> list[float]:
    return [sum(value for _, value in each) / len(ranks) for each in zip(*ranks, strict=True)]


def validate(rank: Rank, path: str) -> float:
    with launched(rank):
        module = Module()
        for parameter in module.parameters():
            nn.init.zeros_(parameter.data)
        found = trainer(rank, "zero3", rank.scratch).validate(module, other_rows(), ckpt_path=path, verbose=False)
        return float(found[0]["validate"])


def save_by_ddp(rank: Rank, directory: str) -> float:
    with launched(rank):
        module = Module()
        made = trainer(rank, "ddp", rank.scratch, max_steps=3)
        made.fit(module, train_rows())
        made.save_checkpoint(f"{directory}/theirs.ckpt")
        return float(made.validate(module, other_rows(), verbose=False)[0]["validate"])


def test_checkpoints_of_the_trainer(tmp_path: Path) -> None:
    """Resumed at two ranks: the same bits. At one: the same losses, within rounding. A checkpoint of theirs gives weights alone."""
    saved = on_ranks(2, save_halfway, str(tmp_path), debug="OFF")
    path = saved[0][1]
    assert sorted(child.name for child in (tmp_path / "kept").iterdir()) == ["step=4.ckpt", "step=8.ckpt"]
    assert zero3.latest_checkpoint(tmp_path / "kept") == tmp_path / "kept" / "step=8.ckpt"
    uninterrupted = [seen for seen, _ in saved]
    alone = zero3.shard(Module())
    assert zero3.load_checkpoint(path, alone)["global_step"] == 4, "one process reads it without Lightning"
    assert zero3.full_state_dict(alone).keys() == Module().state_dict().keys()
    assert on_ranks(2, resume, path, debug="OFF") == [seen[4:] for seen in uninterrupted]
    expected = on_ranks(1, save_halfway, str(tmp_path / "one"), debug="OFF")[0][0]
    assert losses_of_all(on_ranks(1, resume, path, debug="OFF")) == pytest.approx([value for _, value in expected[4:]], abs=1e-5)
    theirs = on_ranks(2, save_by_ddp, str(tmp_path), debug="OFF")
    assert on_ranks(2, validate, f"{tmp_path}/theirs.ckpt", debug="OFF") == pytest.approx(theirs, abs=1e-6)
    outcomes = try_on_ranks(2, resume, f"{tmp_path}/theirs.ckpt", debug="OFF")
    assert all(outcome.error == "ValueError" and "hold an optimizer's state by numbers" in outcome.text for outcome in outcomes)


class Early(Module):
    """Its optimizer is made before the module is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.made = [torch.optim.SGD(self.parameters(), lr=0.1)]

    def configure_optimizers(self) -> Any:
        return self.made


class ByNames(Module):
    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [{"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0}, {"params": [p for _, p in named]}]
        return torch.optim.AdamW(groups, lr=0.05)


class ByShapes(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


WRONG: dict[str, tuple[Callable[[], Module], str]] = {
    "made too early": (Early, "SGD holds parameters that are no chunks of a sharded model: make it in configure_optimizers"),
    "filtered by names": (ByNames, r"group 0 of the AdamW \(weight_decay=0\.0.*is empty.*zero3\.param_groups"),
    "of shapes": (ByShapes, r"Adafactor .* does more than treat each element by itself"),
}
CALLBACKS: dict[str, Callable[[], Any]] = {
    r"StochasticWeightAveraging would mix .*examples/ema\.py": lambda: StochasticWeightAveraging(swa_lrs=0.1),
    r"WeightAveraging would mix .*examples/ema\.py": WeightAveraging,
    r"BackboneFinetuning would unfreeze .*zero3\.set_trainable": BackboneFinetuning,
    "ModelPruning would prune .*before or after": lambda: ModelPruning("l1_unstructured"),
    "OnExceptionCheckpoint would save on the rank that raised alone.*ModelCheckpoint": lambda: OnExceptionCheckpoint("."),
}


def refused(rank: Rank) -> None:
    with launched(rank):
        for kind, told in WRONG.values():
            right = type(kind.__name__, (Module,), {})
            with pytest.raises(ValueError, match=f"^rank 1: .*{told}"):  # on all ranks
                trainer(rank, "zero3", rank.scratch, max_steps=1).fit((kind if rank.number else right)(), train_rows())
        for told, make in CALLBACKS.items():
            module = Module()
            module.backbone = module.net.blocks  # type: ignore[assignment]
            callbacks = [make()] if rank.number or "OnException" in told else []  # all ranks raise what one was told
            with pytest.raises(ValueError, match=rf"^(rank [01]: )?{told}"):
                trainer(rank, "zero3", rank.scratch, max_steps=1, callbacks=callbacks, enable_checkpointing=True).fit(module, train_rows())
            assert not zero3.is_sharded(module)


def test_optimizers_and_callbacks_that_would_train_otherwise_are_refused() -> None:
    on_ranks(2, refused, debug="OFF")


def fit_ignored(rank: Rank, kind: str) -> Seen:
    """Parameters that the policy leaves alone are refused if they train. Frozen ones may be in the optimizer."""
    with launched(rank):
        alone = {"policy": zero3.ShardingPolicy(ignored=lambda name, info: "norm" in name)}
        told = r"ShardingPolicy\(ignored=\.\.\.\) leaves 2 parameters alone that train: net\.norm\.weight, net\.norm\.bias"
        if kind == "zero3":
            with pytest.raises(ValueError, match=told):
                trainer(rank, kind, rank.scratch, alone, max_epochs=1).fit(Module(), train_rows())
        module = Module()
        module.net.norm.requires_grad_(False)
        made = trainer(rank, kind, rank.scratch, alone, max_epochs=1, gradient_clip_val=0.1)
        made.fit(module, train_rows())
        made.save_checkpoint(rank.scratch / kind / "last.ckpt")
        again = Module()
        again.net.norm.requires_grad_(False)
        path = str(rank.scratch / kind / "last.ckpt")
        trainer(rank, kind, rank.scratch, alone, max_epochs=2, gradient_clip_val=0.1).fit(again, train_rows(), ckpt_path=path)
        return module.seen + again.seen


def test_ignored_parameters_that_train_are_refused() -> None:
    ours, theirs = (on_ranks(2, fit_ignored, kind, debug="OFF") for kind in ("zero3", "ddp"))
    for seen, expected in zip(ours, theirs, strict=True):
        assert_close(seen, expected)


OPTIONS: dict[str, tuple[Any, Any]] = {
    "gradient_clip_val": (0.1, 0.2),
    "gradient_clip_algorithm": ("norm", "value"),
    "accumulate_grad_batches": (1, 2),
    "max_epochs": (1, 2),
    "max_steps": (4, 5),
    "limit_train_batches": (2, 3),
    "limit_val_batches": (1, 2),
    "val_check_interval": (2, 1.0),
    "precision": ("32-true", "bf16-mixed"),
}


def told_otherwise(rank: Rank) -> None:
    with launched(rank):
        for option, values in OPTIONS.items():
            told = "rank 0: {0}={1!r}; rank 1: {0}={2!r}".format(option, *map(_told, values))
            with pytest.raises(ValueError, match=f"^ranks differ in what Lightning's Trainer is told: {re.escape(told)}"):
                trainer(rank, "zero3", rank.scratch, **{"max_epochs": 1, option: values[rank.number]}).fit(Module(), train_rows())
        scheduled = [GradientAccumulationScheduler({0: 1, 1: 2 + rank.number})]
        with pytest.raises(ValueError, match=re.escape("rank 1: accumulate_grad_batches={0: 1, 1: 3}")):
            trainer(rank, "zero3", rank.scratch, max_epochs=2, callbacks=scheduled).fit(Module(), train_rows())


def _told(value: Any) -> Any:
    return lightning.pytorch.utilities.GradClipAlgorithmType(value) if value in ("norm", "value") else value


def test_a_trainer_whose_options_differ_between_ranks_is_an_error_on_all() -> None:
    on_ranks(2, told_otherwise, debug="OFF")


def fit_twice(rank: Rank, kind: str) -> Seen:
    """At first without the blocks, then all of it: what stands in BaseFinetuning's place."""
    with launched(rank):
        module = Module()
        module.net.blocks.requires_grad_(False)
        trainer(rank, kind, rank.scratch, max_epochs=1).fit(module, train_rows())
        module.zero_grad()
        if kind == "zero3":
            zero3.set_trainable(module, lambda name, info: True)
        module.requires_grad_(True)
        trainer(rank, kind, rank.scratch, max_epochs=1).fit(module, train_rows())
        return module.seen


def test_set_trainable_between_two_fits() -> None:
    ours, theirs = (on_ranks(2, fit_twice, kind, debug="OFF") for kind in ("zero3", "ddp"))
    for seen, expected in zip(ours, theirs, strict=True):
        assert_close(seen, expected)


def test_strategies_are_lightnings() -> None:
    assert issubclass(Zero3Strategy, lightning.pytorch.strategies.Strategy)
    assert issubclass(Zero3FabricStrategy, lightning.fabric.strategies.Strategy)


PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
EXAMPLES = dict(re.findall(r"^## (Lightning|Fabric)\n\n```python\n(.*?)^```$", PAGE, re.M | re.S))


def run_example(rank: Rank, name: str) -> bool:
    with launched(rank):
        names: dict[str, Any] = {"directory": str(rank.scratch), "train_loader": train_rows(), "module": Module(), "model": Net()}
        names |= {"validation_loader": other_rows(), "test_loader": other_rows()}
        exec(compile(EXAMPLES[name], f"the example of {name}", "exec"), names)
        assert zero3.latest_checkpoint(rank.scratch) is not None
        return bool(zero3.get_trainable_chunk(names["module" if name == "Lightning" else "model"]))


@pytest.mark.parametrize("name", ["Lightning", "Fabric"])
def test_the_examples_of_the_page(name: str) -> None:
    assert on_ranks(2, run_example, name, debug="OFF") == [True, True]
