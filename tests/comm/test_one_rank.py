"""One rank has nobody to speak to: whatever it is asked for, it makes no collective, also in a process group of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import zero3
from tests.support.models import Checkpointed
from zero3 import ShardingPolicy

INT8 = zero3.Int8(32)
POLICIES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "param_dtype": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "grad_dtype": {"param_dtype": torch.bfloat16, "grad_dtype": torch.float32},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2, "param_dtype": torch.bfloat16},
    "dynamic": {"dynamic": True},
    "prefetch_depth 0": {"prefetch_depth": 0},
    "transactional": {"transactional": True},
    "compare_every": {"compare_every": 1},
    "separate_backup_group": {"separate_backup_group": True},
    "compressed": {"gather_format": INT8, "reduce_format": INT8},
    "quantize": {"quantize": zero3.NF4()},
    "offload to cpu": {"offload": "cpu"},
    "offload to files": {"offload": "DIR"},
    "resident_bytes": {"resident_bytes": 1 << 20, "param_dtype": torch.bfloat16},
    "reshard_after_forward": {"reshard_after_forward": False, "gradient_reduction": "sum"},
    "ignored": {"ignored": lambda name, info: name.endswith("bias")},
}


class Collectives(TorchDispatchMode):
    """The names of all collectives that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.made.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def block(kind: bool | None = None) -> nn.Module:
    inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return inner if kind is None else Checkpointed(inner, kind)


def made(policy: dict[str, Any], folder: Path, make: Callable[[], nn.Module] = block, **options: Any) -> nn.Module:
    model = nn.Sequential(make(), make(), nn.Linear(8, 8))
    if "quantize" in policy:
        model[0].requires_grad_(False)
    chosen = {**policy, "offload": str(folder)} if policy.get("offload") == "DIR" else policy
    return zero3.shard(model, list(model), policy=ShardingPolicy(**chosen), **options)


def loss_of(model: nn.Module) -> Tensor:
    loss: Tensor = model(torch.ones(2, 8)).float().pow(2).mean()
    return loss


@pytest.mark.parametrize("name", POLICIES)
def test_a_step_of_one_rank_makes_no_collective(name: str, tmp_path: Path, group: Any) -> None:
    with Collectives() as seen:
        model = made(POLICIES[name], tmp_path)
        optimizer = zero3.offload_optimizer(torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.01))
        for step in range(3):
            with zero3.no_sync(model) if step == 1 else nullcontext():
                loss_of(model).backward()
            zero3.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(model)
            with zero3.full_params(model):
                pass
    assert seen.made == []


def _scaled(model: nn.Module, folder: Path) -> None:
    scaler, optimizer = zero3.GradScaler("cpu", init_scale=2.0), torch.optim.SGD(zero3.get_trainable_chunk(model), lr=0.1)
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update()


def _guarded(model: nn.Module, folder: Path) -> None:
    for fails in (False, True):
        with zero3.step_guard(model):
            loss_of(model).backward()
            if fails:
                raise RuntimeError("as told")


def _whole(model: nn.Module, folder: Path) -> None:
    optimizer = torch.optim.SGD(zero3.param_groups(model, lambda name, info: {"whole": info.ndim == 2}), lr=0.1)
    loss_of(model).backward()
    optimizer.step()


def _saved(model: nn.Module, folder: Path) -> None:
    optimizer = torch.optim.AdamW(zero3.get_trainable_chunk(model), lr=0.1)
    loss_of(model).backward()
    optimizer.step()
    zero3.save_checkpoint(folder / "checkpoint", model, optimizer, extra={"step": 1})
    zero3.load_checkpoint(folder / "checkpoint", model, optimizer)
    zero3.load_full_state_dict(model, zero3.full_state_dict(model))
    zero3.load_full_optimizer_state_dict(model, optimizer, zero3.full_optimizer_state_dict(model, optimizer))


def _looked_at(model: nn.Module, folder: Path) -> None:
    zero3.backward(loss_of(model), torch.tensor(3), model)
    zero3.parameter_norms(model)
    zero3.named_gradients(model)
    model.zero_grad()
    zero3.set_trainable(model, lambda name, info: name.endswith("weight"))
    with zero3.resident(model), torch.no_grad():
        loss_of(model)
    zero3.report(model)


LIVES = (_scaled, _guarded, _whole, _saved, _looked_at)


@pytest.mark.parametrize("live", LIVES, ids=lambda live: live.__name__)
def test_a_life_of_one_rank_makes_no_collective(live: Callable[[nn.Module, Path], None], tmp_path: Path, group: Any) -> None:
    model = made({}, tmp_path)
    with Collectives() as seen:
        live(model, tmp_path)
    assert seen.made == []


@pytest.mark.parametrize("kind", [True, False])
def test_checkpointing_on_a_mesh_of_one_rank_makes_no_collective(kind: bool, tmp_path: Path, group: Any) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    with Collectives() as seen:
        model = made({"param_dtype": torch.bfloat16}, tmp_path, lambda: block(kind), process_group=mesh)
        for _ in range(3):
            model(torch.ones(2, 8).requires_grad_()).float().sum().backward()
    assert seen.made == []
