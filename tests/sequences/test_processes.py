"""Parts of sequences over processes, on torch's meshes with `sp`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.sequences.texts import assert_gradients, batch, made, plain_step, step
from tests.support.processes import Rank, on_ranks

DIMENSIONS = ("dp_replicate", "dp_shard", "sp")


def train(rank: Rank, shape: tuple[int, ...], directory: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=DIMENSIONS[-len(shape) :])
    mine, plain, parts = made(), made(), shape[-1]
    zero3.shard(mine, process_group=mesh)
    groups = rank.world_size // parts
    optimizers = [torch.optim.AdamW(each, 0.01) for each in (zero3.get_trainable_chunk(mine), plain.parameters())]
    for number in range(2):
        for each in optimizers:
            each.zero_grad()
        plain_step(plain, [batch(group, 7 + group, "left", step=number) for group in range(groups)])
        index = rank.number // parts
        step(mine, batch(index, 7 + index, "left", step=number))
        assert_gradients(mine, plain)
        for each in optimizers:
            each.step()
    zero3.save_pretrained(mine, directory)
    zero3.save_checkpoint(f"{directory}/checkpoint", mine, optimizers[0])
    whole, again = made(), made()
    zero3.shard(again)  # on any mesh
    zero3.load_checkpoint(f"{directory}/checkpoint", again)
    whole = type(whole).from_pretrained(directory, dtype=torch.float64)
    full = zero3.full_state_dict(again, rank0_only=False)
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(full[name], value, rtol=0, atol=0)
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-6, atol=1e-8)
    names = [str(path.read_text()) for path in Path(directory).glob("*.json")]
    return {"config": "".join(names), "report": str(zero3.report(mine)), "world": zero3.report(mine).world_size}


@pytest.mark.parametrize(
    "shape", [(1, 2), pytest.param((2, 1, 2), marks=pytest.mark.slow), pytest.param((2, 2), marks=pytest.mark.slow)], ids=str
)
def test_parts_over_processes_train_as_plain(shape: tuple[int, ...], tmp_path: Path) -> None:
    """What is saved knows nothing of sp, and loads on any mesh."""
    ranks = torch.tensor(shape).prod().item()
    for found in on_ranks(int(ranks), train, shape, str(tmp_path)):
        assert "zero3_" not in found["config"]
        assert f"parts of sequences over {shape[-1]} ranks" in found["report"]


def other_names(rank: Rank) -> None:
    for names in (("sp", "dp_shard"), ("dp", "sp"), ("dp_replicate", "sp")):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
        with pytest.raises(ValueError, match="'sp'"):
            zero3.shard(made(), process_group=mesh)
    with pytest.raises(ValueError, match=r"'ep'.*'sp'"):
        zero3.shard(made(), process_group=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp_shard", "ep", "sp")))


def test_meshes_of_other_names_are_refused() -> None:
    on_ranks(2, other_names)
