"""Every system under test: from the same layers to a model that trains. A peer that is not installed says so."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .counters import send_by_sockets

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
RATES = {"adamw": 3e-4, "sgd": 0.1}


@dataclass
class Training:
    """A model and what a step does with it. DeepSpeed has words of its own for the latter."""

    model: nn.Module
    optimizer: Any
    accumulating: Callable[[], AbstractContextManager[object]] = nullcontext  # around all micro-batches of a step but the last

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


class DeepSpeedTraining(Training):
    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)  # type: ignore[operator]

    def update(self) -> None:
        self.model.step()  # type: ignore[operator]


def optimizer_class(name: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[name], {"lr": RATES[name]}


def _train(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    optimizer: str,
    accumulating: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Training:
    kind, options = optimizer_class(optimizer)
    return Training(model, kind(parameters, **options), accumulating)


def plain(modules: list[nn.Module], optimizer: str, **_: Any) -> Training:
    """torch without any distribution: one process, or several that never speak."""
    model = nn.Sequential(*modules)
    return _train(model, model.parameters(), optimizer)


def ddp(modules: list[nn.Module], optimizer: str, **_: Any) -> Training:
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*modules))
    return _train(model, model.parameters(), optimizer, model.no_sync)


def ddp_zero1(modules: list[nn.Module], optimizer: str, **_: Any) -> Training:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(nn.Sequential(*modules))
    kind, options = optimizer_class(optimizer)
    return Training(model, ZeroRedundancyOptimizer(model.parameters(), kind, **options))


def fsdp1(modules: list[nn.Module], optimizer: str, *, device: str = "cpu", **_: Any) -> Training:
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({type(module) for module in modules})
    model = Fsdp(nn.Sequential(*modules), auto_wrap_policy=policy, device_id=torch.device(device))
    return _train(model, model.parameters(), optimizer)


def fsdp2(modules: list[nn.Module], optimizer: str, *, param_dtype: torch.dtype | None = None, mesh: Any = None, **_: Any) -> Training:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=param_dtype)
    model = nn.Sequential(*modules)
    for module in model:
        fully_shard(module, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    return _train(model, model.parameters(), optimizer)


def _two_replicas() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def fsdp2_hsdp(modules: list[nn.Module], optimizer: str, **options: Any) -> Training:
    training = fsdp2(modules, optimizer, mesh=_two_replicas(), **options)
    model: Any = training.model

    @contextmanager
    def inside_replicas() -> Iterator[None]:
        model.set_requires_all_reduce(False)
        yield
        model.set_requires_all_reduce(True)

    training.accumulating = inside_replicas
    return training


def deepspeed3(modules: list[nn.Module], optimizer: str, **_: Any) -> Training:
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    import deepspeed
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    model = nn.Sequential(*modules)
    kind, options = optimizer_class(optimizer)
    largest = max(sum(parameter.numel() for parameter in module.parameters()) for module in modules)
    config = {
        "train_micro_batch_size_per_gpu": 1,  # not looked at: the batch is what the model is called with
        "gradient_clipping": 0.0,  # it clips by default
        "zero_optimization": {  # its defaults are for models of billions of parameters: here they would hold all of it
            "stage": 3,
            "reduce_bucket_size": largest,
            "stage3_prefetch_bucket_size": largest,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 2 * largest,
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    engine, wrapped, _, _ = deepspeed.initialize(model=model, optimizer=kind(model.parameters(), **options), config=config)
    return DeepSpeedTraining(engine, wrapped)


def zero3(
    modules: list[nn.Module],
    optimizer: str,
    *,
    param_dtype: torch.dtype | None = None,
    mesh: Any = None,
    int8: bool = False,
    chosen: Any = None,
    **_: Any,
) -> Training:
    """`chosen`: other fields of the policy."""
    from zero3 import Int8, ShardingPolicy, Zero3Layer, Zero3Sequential, no_sync

    kind = Int8() if int8 else None
    policy = ShardingPolicy(param_dtype=param_dtype, gather_format=kind, reduce_format=kind, **(chosen or {}))
    model = Zero3Sequential([Zero3Layer(module, policy=policy, process_group=mesh) for module in modules])
    return _train(model, model.get_trainable_chunk(), optimizer, partial(no_sync, model, replicas_only=True))


def zero3_hsdp(modules: list[nn.Module], optimizer: str, **options: Any) -> Training:
    return zero3(modules, optimizer, mesh=_two_replicas(), **options)


def zero3_int8(modules: list[nn.Module], optimizer: str, **options: Any) -> Training:
    """Gathers and reductions in eight bits."""
    return zero3(modules, optimizer, int8=True, **options)


def zero3_hsdp_int8(modules: list[nn.Module], optimizer: str, **options: Any) -> Training:
    return zero3_hsdp(modules, optimizer, int8=True, **options)


def zero3_by_sockets(modules: list[nn.Module], optimizer: str, **options: Any) -> Training:
    """As between hosts, though both ranks are on one."""
    send_by_sockets()
    return zero3(modules, optimizer, **options)


def zero3_compiled(modules: list[nn.Module], optimizer: str, **options: Any) -> Training:
    """torch.compile of each layer's module, before sharding."""
    for module in modules:
        module.compile()
    return zero3(modules, optimizer, **options)


def zero3_in_compiled_model(modules: list[nn.Module], optimizer: str, **options: Any) -> Training:
    """torch.compile of the sharded model, whose graphs end at layers."""
    training = zero3(modules, optimizer, **options)
    training.model = torch.compile(training.model)  # type: ignore[assignment]
    return training


def fsdp2_compiled(modules: list[nn.Module], optimizer: str, **options: Any) -> Training:
    """As FSDP2's authors advise: each block compiled before it is sharded."""
    for module in modules:
        module.compile()
    return fsdp2(modules, optimizer, **options)


NO_COMMUNICATION = "no communication"
SYSTEMS: dict[str, Callable[..., Training]] = {
    NO_COMMUNICATION: plain,
    "DDP": ddp,
    "DDP + ZeroRedundancyOptimizer": ddp_zero1,
    "FSDP1": fsdp1,
    "FSDP2": fsdp2,
    "DeepSpeed ZeRO-3": deepspeed3,
    "zero3": zero3,
    "zero3 by sockets": zero3_by_sockets,
    "FSDP2 HSDP": fsdp2_hsdp,
    "zero3 HSDP": zero3_hsdp,
}

# other numbers than exact ones: by name only
COMPRESSED: dict[str, Callable[..., Training]] = {"zero3 int8": zero3_int8, "zero3 HSDP int8": zero3_hsdp_int8}


# torch.compile needs a C++ compiler on a CPU, and minutes: by name only.
COMPILED: dict[str, Callable[..., Training]] = {
    "zero3, blocks compiled": zero3_compiled,
    "zero3, model compiled": zero3_in_compiled_model,
    "FSDP2, blocks compiled": fsdp2_compiled,
}


# Policies of zero3 beside its default: by name only.
POLICIES: dict[str, dict[str, Any]] = {
    "zero3, nothing ahead": {"prefetch_depth": 0},
    "zero3, two ahead": {"prefetch_depth": 2},
    "zero3, gathered once": {"reshard_after_forward": False},
    "zero3, stage 2": {"stage": 2},
}
BY_NAME = COMPILED | COMPRESSED | {name: partial(zero3, chosen=chosen) for name, chosen in POLICIES.items()}


def missing(system: str) -> str:
    """Why a system can't be measured here; "" if it can."""
    return "not installed (pip install deepspeed)" if system.startswith("DeepSpeed") and find_spec("deepspeed") is None else ""
