"""Checkpoints as DeepSpeed 0.19 writes them at ZeRO stage 3, of a plain model and its optimizer: so they need no DeepSpeed.

`_rigid_state_dict` of its runtime/zero/stage3.py, and `_save_checkpoint` and `_save_zero_checkpoint` of its runtime/engine.py, say
what is in them; tests/formats/test_deepspeed.py compares with files of its own, where it is installed.
"""

from __future__ import annotations

import enum
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["write_zero3"]


class ZeroStageEnum(int, enum.Enum):
    weights = 3


class LossScaler:
    def __init__(self) -> None:
        self.cur_scale = 1.0
        self.dynamic = False


class DynamicLossScaler:
    """Of runs in fp16."""

    def __init__(self) -> None:
        self.cur_scale, self.cur_iter, self.dynamic, self.dtype = 65536.0, 7, True, torch.float16


_SCALERS = "deepspeed.runtime.fp16.loss_scaler"
_PLACES = {ZeroStageEnum: "deepspeed.runtime.zero.config", LossScaler: _SCALERS, DynamicLossScaler: _SCALERS}


@contextmanager
def _as_deepspeeds() -> Iterator[None]:
    """Pickles name these classes as DeepSpeed's, while it lasts."""
    parents = {".".join(name.split(".")[:length]) for name in _PLACES.values() for length in range(1, 6)}
    before = {name: sys.modules.get(name) for name in parents}
    try:
        sys.modules |= {name: ModuleType(name) for name in parents}
        for made, name in _PLACES.items():
            made.__module__ = name
            setattr(sys.modules[name], made.__name__, made)
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _piece(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    length = -(-tensor.numel() // ranks)
    padded = torch.zeros(length * ranks, dtype=tensor.dtype)
    padded[: tensor.numel()] = tensor.detach().reshape(-1)
    return padded[rank * length : (rank + 1) * length].clone()


def write_zero3(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ranks: int,
    *,
    client: dict[str, Any],
    bf16: bool = False,
    fp16: bool = False,
    most: int = 10**9,
) -> None:
    """`most`: elements of a rank after which a sub-group ends."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    subs: list[list[Tensor]] = []
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": []})
        subs.append([])
        groups[-1]["params"].append(len(subs) - 1)
        for at, parameter in enumerate(group["params"]):
            subs[-1].append(parameter)
            if sum(-(-each.numel() // ranks) for each in subs[-1]) >= most and at + 1 < len(group["params"]):
                subs.append([])
                groups[-1]["params"].append(len(subs) - 1)
    trained = {id(parameter) for sub in subs for parameter in sub}
    frozen = {name: parameter for name, parameter in model.named_parameters() if id(parameter) not in trained}
    (directory / "global_step2").mkdir(parents=True)
    (directory / "latest").write_text("global_step2")
    for rank in range(ranks):
        place = directory / "global_step2"
        config = {"ds_config": {"zero_optimization": {"stage": 3, "sub_group_size": most}}}
        found = _model(model, names, subs, frozen, rank, ranks) | config | client
        torch.save(found, place / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        flats = [torch.cat([_piece(parameter, rank, ranks) for parameter in sub]) for sub in subs]
        state = {number: _state(optimizer, sub, rank, ranks) for number, sub in enumerate(subs)}
        inner = {"state": state, "param_groups": groups}
        content = {"zero_stage": ZeroStageEnum.weights, "dynamic_loss_scale": fp16, "overflow": False}
        content["loss_scaler"] = DynamicLossScaler() if fp16 else LossScaler()
        content |= {"partition_count": ranks, "optimizer_state_dict": inner, "fp32_flat_groups": [nn.Parameter(flat) for flat in flats]}
        prefix = "bf16_" if bf16 else ""
        with _as_deepspeeds():
            torch.save(
                {"optimizer_state_dict": content, "ds_config": {}, "ds_version": "0.19.8"},
                place / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )


def _state(optimizer: torch.optim.Optimizer, sub: list[Tensor], rank: int, ranks: int) -> dict[str, Any]:
    states = [optimizer.state[parameter] for parameter in sub]
    found: dict[str, Any] = {}
    for key, value in states[0].items():
        found[key] = value if key == "step" else torch.cat([_piece(state[key], rank, ranks) for state in states])
    return found


def _model(
    model: nn.Module, names: dict[int, str], subs: list[list[Tensor]], frozen: dict[str, Tensor], rank: int, ranks: int
) -> dict[str, Any]:
    buffers = {name for name, _ in model.named_buffers()}
    module = OrderedDict((name, value if name in buffers else value.new_empty(0)) for name, value in model.state_dict().items())
    shared = {
        name: names[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False) if names[id(parameter)] != name
    }
    return {
        "module": module,
        "buffer_names": [name for name in module if name in buffers],
        "optimizer": None,
        "param_shapes": [OrderedDict((names[id(parameter)], parameter.shape) for parameter in sub) for sub in subs],
        "frozen_param_shapes": OrderedDict((name, parameter.shape) for name, parameter in frozen.items()),
        "shared_params": shared if rank == 0 else {},
        "frozen_param_fragments": OrderedDict((name, _piece(parameter, rank, ranks)) for name, parameter in frozen.items()),
        "lr_scheduler": {"last_epoch": 2},
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": 2,
        "global_samples": 4,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_version": "0.19.8",
    }
