"""Models saved in Hugging Face directories, models on meta to load them into, and what was loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zero3
from tests.support.architectures import ARCHITECTURES
from tests.support.ranks import ThreadCommunicator, run_ranks
from tests.support.reference import Turn

SINGLE = "model.safetensors"
TURN = Turn(0, 0, 1)


def saved(name: str, directory: Path, shard_size: str = "5GB", dtype: torch.dtype | None = None) -> Any:
    """A model of that architecture as transformers saves it, and as transformers reads it again."""
    model = ARCHITECTURES[name].build().to(dtype or ARCHITECTURES[name].dtype).eval()
    model.save_pretrained(directory, max_shard_size=shard_size)
    return type(model).from_pretrained(directory, dtype=model.dtype).eval()


def on_meta(like: Any, dtype: torch.dtype | None = None) -> Any:
    with torch.device("meta"):
        return type(like)(like.config).to(dtype or like.dtype).eval()


def loaded(model: nn.Module, directory: Path, world_size: int, **options: Any) -> list[dict[str, Tensor]]:
    """The full state dict, on every rank, of a model on meta after loading."""

    def body(group: ThreadCommunicator) -> dict[str, Tensor]:
        own = zero3.shard(models[group.rank], process_group=group)
        zero3.load_pretrained(own, directory, **options)
        return zero3.full_state_dict(own, rank0_only=False)

    models = [on_meta(model) for _ in range(world_size)]
    return run_ranks(world_size, body)


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)), name


def rewritten(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / SINGLE)
    change(tensors)
    save_file(tensors, directory / SINGLE)
