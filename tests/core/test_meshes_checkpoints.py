"""Checkpoints of meshes of real processes, and ranks of a mesh that run out of data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.core.test_meshes import chunks_of
from tests.core.test_meshes_processes import NAMES, mesh_of, sharded
from tests.support.processes import Rank, on_ranks
from tests.support.training import SGD, loss_of, odd_model, sentences

pytestmark = pytest.mark.slow


def save(rank: Rank, path: str) -> dict[str, Tensor]:
    model = sharded(rank, mesh_of(2, 2))
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        loss_of(model, sentences(step)[rank.number :: rank.world_size]).backward()
        optimizer.step()
    torch.manual_seed(rank.number)
    zero3.save_checkpoint(path, model, optimizer, extra={"rank": rank.number})
    optimizer.zero_grad()
    loss_of(model, sentences(2)[rank.number :: rank.world_size]).backward()
    optimizer.step()
    return zero3.full_state_dict(model, rank0_only=False)


def load(rank: Rank, path: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    model = sharded(rank, mesh_of(*shape) if shape else None)
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01)
    assert zero3.load_checkpoint(path, model, optimizer) == {"rank": 0}
    if rank.world_size == 4:
        assert torch.initial_seed() == rank.number, "each rank has its own random generator back"
    optimizer.zero_grad()
    loss_of(model, sentences(2)[rank.number :: rank.world_size]).backward()
    optimizer.step()
    state = zero3.full_optimizer_state_dict(model, optimizer, rank0_only=False)["state"]
    return zero3.full_state_dict(model, rank0_only=False) | {f"{name} of Adam": state[name]["exp_avg"] for name in state}


def test_save_checkpoint_writes_each_value_once_and_load_checkpoint_takes_it_on_any_mesh(tmp_path: Any) -> None:
    path = str(tmp_path / "saved")
    expected = on_ranks(4, save, path)[0]
    files = {file.name: file.stat().st_size for file in (tmp_path / "saved").glob("data-*/*")}
    assert sorted(name for name in files if name.startswith("optimizer")) == [
        f"optimizer-{rank:05}-of-00004.safetensors" for rank in range(2)
    ]
    parameters = sum(value.nbytes for value in expected.values())
    assert sum(size for name, size in files.items() if name.startswith("optimizer")) < 2 * parameters + 10_000
    directory = next((tmp_path / "saved").glob("data-*"))
    held = [name for file in sorted(files) for name in load_file(directory / file)]
    assert len(held) == len(set(held))
    assert {name.partition("[")[0] for name in held if name.startswith("parameter:")} == {f"parameter:{name}" for name in expected}
    runs = {shape: on_ranks(ranks, load, path, shape) for ranks, shape in ((4, (2, 2)), (2, (2, 1)), (3, ()))}
    for shape, found in runs.items():
        for rank, values in enumerate(found):
            for name, value in values.items():
                first = expected.get(name, runs[(2, 2)][0][name])
                assert (value - first).abs().max() <= 1e-12, f"{name} of rank {rank} on {shape}"


def without_data(rank: Rank) -> dict[str, Tensor]:
    model = sharded(rank, mesh_of(2, 2))
    optimizer = SGD.build(zero3.get_trainable_chunk(model))
    uneven = zero3.joinable(model, lambda: (zero3.clip_grad_norm_(model, 1.0), optimizer.step(), optimizer.zero_grad()))
    with Join([uneven], divide_by_initial_world_size=False):
        for step in range(2 + rank.number % 3):
            loss_of(model, sentences(step)[rank.number :: rank.world_size]).backward()
            uneven.step()
    for chunk in chunks_of(model):
        assert chunk.isfinite().all()
    return zero3.full_state_dict(model, rank0_only=False)


def test_joinable_on_a_mesh() -> None:
    found = on_ranks(4, without_data)
    plain = nn.Sequential(*odd_model(torch.float64))
    optimizer = SGD.build(plain.parameters())
    for step in range(4):
        present = [rank for rank in range(4) if step < 2 + rank % 3]
        optimizer.zero_grad()
        for rank in present:
            (loss_of(plain, sentences(step)[rank::4]) / len(present)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    for values in found:
        for name, parameter in plain.named_parameters():
            assert (values[name] - parameter).abs().max() <= 1e-10, name


def of_a_slice(rank: Rank) -> None:
    cube = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", *NAMES))
    model = zero3.Zero3Layer(nn.Linear(2, 2), process_group=cube[NAMES])
    with pytest.raises(RuntimeError, match="A mesh with replicas has one if it holds all ranks"):
        zero3.joinable(model, lambda: None)


def test_joinable_on_a_slice_of_a_larger_mesh_is_refused() -> None:
    on_ranks(4, of_a_slice)
