"""Every system under test: from the same layers to (model, optimizer). A system that is not installed raises ImportError."""

from __future__ import annotations

from collections.abc import Callable

import torch
from model import Size, layers
from torch import nn

Built = tuple[nn.Module, torch.optim.Optimizer]


def _adamw(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4)  # type: ignore[arg-type]


def no_communication(size: Size) -> Built:
    """Processes side by side, each with all of the model, that never speak: what the machine can do at best."""
    model = nn.Sequential(*layers(size))
    return model, _adamw(model.parameters())


def ddp(size: Size) -> Built:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers(size)))
    return model, _adamw(model.parameters())


def ddp_zero1(size: Size) -> Built:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers(size)))
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=3e-4)


def fsdp1(size: Size) -> Built:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    modules = layers(size)
    policy = ModuleWrapPolicy({type(module) for module in modules})
    model = Fsdp(nn.Sequential(*modules), auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return model, _adamw(model.parameters())


def fsdp2(size: Size) -> Built:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(*layers(size))
    for module in model:
        fully_shard(module)
    fully_shard(model)
    return model, _adamw(model.parameters())


def zero3(size: Size) -> Built:
    from zero3 import Zero3Layer, Zero3Sequential

    model = Zero3Sequential([Zero3Layer(module) for module in layers(size)])
    return model, _adamw(model.get_trainable_chunk())


SYSTEMS: dict[str, Callable[[Size], Built]] = {
    "no communication": no_communication,
    "DDP": ddp,
    "DDP + ZeroRedundancyOptimizer": ddp_zero1,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "zero3": zero3,
}
