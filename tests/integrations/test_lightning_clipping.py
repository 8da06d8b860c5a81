"""Lightning and Fabric clip what an optimizer holds, as beside DDP: of several optimizers, and of one over a part of what trains."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

lightning = pytest.importorskip("lightning", reason="Lightning is not installed (pip install 'zero3[lightning]')")

from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy  # noqa: E402

import zero3  # noqa: E402
from tests.support.lightnings import Module, Net, Rows, environment, launched, train_rows, trainer  # noqa: E402
from tests.support.processes import Rank, on_ranks  # noqa: E402
from zero3 import ShardingPolicy  # noqa: E402
from zero3.integrations.lightning import Zero3FabricStrategy  # noqa: E402

pytestmark = pytest.mark.slow


class Pair(nn.Module):
    """Two nets whose gradients are of different sizes. In the root's own chunk lie norms of both."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = Net(), Net()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.small(x) + 10 * self.large(x)
        return found


def sgd(parameters: Iterable[Any]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.5)


def halves(model: Any, divided: bool) -> list[torch.optim.Optimizer]:
    """One optimizer for each net."""
    if not divided:
        return [sgd(net.parameters()) for net in (model.small, model.large)]
    inner = getattr(model, "module", model)
    groups = zero3.param_groups(inner, lambda name, info: {"of": "small" if "small." in name else "large"})
    return [sgd([next(group for group in groups if group["of"] == of)]) for of in ("small", "large")]


class TwoOptimizers(Module):
    algorithm = "norm"

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net: Any = Pair()

    def training_step(self, batch: Any, number: int) -> Tensor:
        loss = self._loss("train", batch)
        self.manual_backward(loss)
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm=self.algorithm)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return halves(self.net, zero3.is_sharded(self))


class TwoByValue(TwoOptimizers):
    algorithm = "value"


class APart(TwoOptimizers):
    """The trainer clips. `large` is in no optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch: Any, number: int) -> Tensor:
        return self._loss("train", batch)

    def configure_optimizers(self) -> Any:
        return sgd(self.net.small.parameters())


def fit(rank: Rank, kind: str, module: type[Module], options: dict[str, Any]) -> list[float]:
    with launched(rank):
        made = module()
        sharding = {"layers": [Net]} if module is APart else {}
        trainer(rank, kind, rank.scratch, sharding=sharding, max_epochs=1, **options).fit(made, train_rows())
        return [value for _, value in made.seen]


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (TwoOptimizers, {}),
        (TwoByValue, {}),
        (APart, {"gradient_clip_val": 0.1}),
        (APart, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    ],
)
def test_lightning_clips_what_the_optimizer_holds(module: type[Module], options: dict[str, Any]) -> None:
    ours, theirs = (on_ranks(2, fit, kind, module, options, debug="OFF") for kind in ("zero3", "ddp"))
    for found, expected in zip(ours, theirs, strict=True):
        assert found == pytest.approx(expected, rel=1e-6, abs=5e-6) and len(found) > 3


POLICIES: dict[str, ShardingPolicy] = {
    "chunks": ShardingPolicy(),
    "divided": ShardingPolicy(),
    "chunks, stage 1": ShardingPolicy(stage=1),
    "divided, in files": ShardingPolicy(offload="files"),
}


def loop(rank: Rank, kind: str, name: str) -> list[tuple[float, ...]]:
    """Norms of two orders, and values, in turn."""
    with launched(rank):
        policy = POLICIES[name]
        if policy.offload is not None:
            policy = dataclasses.replace(policy, offload=str(rank.scratch))
        layers = [Net] if name.startswith("chunks") else [nn.Sequential]
        strategy = Zero3FabricStrategy(policy=policy, layers=layers) if kind == "zero3" else FabricDDPStrategy()
        fabric = lightning.Fabric(accelerator="cpu", devices=rank.world_size, strategy=strategy, plugins=[environment()])
        fabric.launch()
        torch.manual_seed(0)
        model: Any = fabric.setup_module(Pair())
        optimizers = [fabric.setup_optimizers(each) for each in halves(model, kind == "zero3" and not name.startswith("chunks"))]
        rows, told = Rows(48, 0), []
        for step in range(6):
            mine = slice(8 * step + rank.number, 8 * (step + 1), rank.world_size)
            loss = nn.functional.mse_loss(model(rows.inputs[mine]), rows.targets[mine])
            fabric.backward(loss)
            for optimizer in optimizers[: 1 if step == 3 else 2]:  # only one of them is clipped, and steps
                norm = torch.zeros(())
                if step % 3 == 2:
                    fabric.clip_gradients(model, optimizer, clip_val=0.01)
                else:
                    norm = fabric.clip_gradients(model, optimizer, max_norm=0.1, norm_type=2.0 if step % 3 else float("inf"))
                optimizer.step()
                told.append((fabric.all_reduce(loss.detach()).item(), norm.item()))
            model.zero_grad()
        return told


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_fabric_clips_what_the_optimizer_holds(name: str, world_size: int) -> None:
    ours, theirs = (on_ranks(world_size, loop, kind, name, debug="OFF") for kind in ("zero3", "ddp"))
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.tensor(found).numpy() == pytest.approx(torch.tensor(expected).numpy(), rel=2e-5, abs=2e-6)


def scaled(rank: Rank, scale: float | None) -> list[float]:
    """Two models, an optimizer over both. `scale`: of losses. A power of two changes no bit."""
    with launched(rank):
        plugins = [environment()]
        fabric = lightning.Fabric(
            accelerator="cpu", devices=rank.world_size, strategy=Zero3FabricStrategy(), plugins=plugins, precision="bf16-mixed"
        )
        fabric.launch()
        torch.manual_seed(0)
        models: Any = [fabric.setup_module(Net())]
        if scale is not None:
            fabric.strategy.precision.scaler = zero3.GradScaler("cpu", init_scale=scale)
        models.append(fabric.setup_module(Net()))
        assert scale is None or fabric.strategy.precision.scaler.get_scale() == scale, "a second module leaves it as it is"
        optimizer = fabric.setup_optimizers(sgd(parameter for model in models for parameter in model.parameters()))
        norms = []
        rows = Rows(4, rank.number)
        for _ in range(3):
            loss = sum(nn.functional.mse_loss(model(rows.inputs), rows.targets) for model in models)
            fabric.backward(loss)
            norms.append(fabric.clip_gradients(models[0], optimizer, max_norm=0.2).item())
            norms.append(zero3.clip_grad_norm_(nn.ModuleList(models), float("inf")).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms


def test_fabric_unscales_what_it_clips_and_counts_all_models_of_an_optimizer() -> None:
    plain, found = (on_ranks(2, scaled, scale, debug="OFF")[0] for scale in (None, 1024.0))
    assert found == plain
    assert plain[1::2] == pytest.approx([0.2] * 3, rel=1e-3), "the gradients of both are scaled"
