"""What the tests of Lightning share: a module, its data, and trainers on processes that are there already."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning
import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from tests.support.processes import Rank
from zero3.integrations.lightning import Zero3Strategy

WIDTH = 6


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """The same numbers every time."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(count, WIDTH, generator=generator)
        self.targets = torch.randn(count, WIDTH, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


class Module(lightning.LightningModule):
    """It keeps the losses that it has seen, of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = Net()
        self.seen: list[tuple[str, float]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def _loss(self, kind: str, batch: Any) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]).float(), batch[1])
        self.log(kind, loss, sync_dist=kind != "train")
        self.seen.append((kind, loss.item()))
        return loss

    def training_step(self, batch: Any, number: int) -> Tensor:
        return self._loss("train", batch)

    def validation_step(self, batch: Any, number: int) -> Tensor:
        return self._loss("validate", batch)

    def test_step(self, batch: Any, number: int) -> Tensor:
        return self._loss("test", batch)

    def predict_step(self, batch: Any, number: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train_rows(batch: int = 2) -> DataLoader[Any]:
    return DataLoader(Rows(16, 0), batch_size=batch)


def other_rows() -> DataLoader[Any]:
    return DataLoader(Rows(8, 1), batch_size=2)


@contextmanager
def launched(rank: Rank) -> Iterator[None]:
    """As torchrun would have started the processes, for Lightning, which warns of much."""
    found = {"RANK": rank.number, "LOCAL_RANK": rank.number, "WORLD_SIZE": rank.world_size, "GROUP_RANK": 0}
    told = {name: str(value) for name, value in found.items()} | {"LOCAL_WORLD_SIZE": str(rank.world_size)}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "test"}
    with mock.patch.dict(os.environ, told), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def environment() -> Any:
    """A plugin that says: processes are there."""
    return TorchElasticEnvironment()


def trainer(rank: Rank, kind: str, directory: Path, sharding: dict[str, Any] | None = None, **options: Any) -> lightning.Trainer:
    """`kind`: "ddp" or "zero3". `sharding`: the strategy's own arguments."""
    chosen = Zero3Strategy(**sharding or {}) if kind == "zero3" else DDPStrategy()
    plugins = [environment(), *options.pop("plugins", [])]
    plain = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(
        accelerator="cpu",
        devices=rank.world_size,
        strategy=chosen,
        plugins=plugins,
        default_root_dir=directory / kind,
        **{**plain, **options},  # type: ignore[arg-type]
    )
