"""Wrappers of other libraries would broadcast, reduce or shard a sharded model once more. They are refused by name.

Such a wrapper first asks the model for its modules or its parameters, and only then exchanges or changes anything. The
question comes through a method of ours, which looks at who asks. So nothing of torch is patched, and it makes no
difference whether the sharded model is what is wrapped or a part of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import MappingProxyType

import torch
from torch import nn

__all__: list[str] = []

# The file that asks, or that defines the wrapper's class (as the name of a module, or its beginning), and the wrapper's name.
_WRAPPERS = MappingProxyType(
    {
        "torch.nn.parallel.distributed": "DistributedDataParallel",
        "torch.nn.parallel.replicate": "DataParallel",
        "torch.nn.parallel.data_parallel": "DataParallel",
        "torch.distributed.fsdp._fully_shard.": "fully_shard (FSDP2)",
        "torch.distributed.fsdp._init_utils": "FullyShardedDataParallel (FSDP1)",
        "torch.distributed.fsdp._wrap_utils": "FullyShardedDataParallel (FSDP1)",
        "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel (FSDP1)",
        "torch.distributed._composable.replicate": "replicate (the composable DistributedDataParallel)",
        "torch.distributed.tensor._api": "distribute_module (tensor parallelism)",
        "torch.distributed.tensor.parallel.": "parallelize_module (tensor parallelism)",
        "deepspeed.runtime.": "DeepSpeed",
        "deepspeed.inference.": "DeepSpeed",
        "deepspeed.utils.debug": "DeepSpeed",  # deepspeed.initialize asks here first
    }
)
_BEGINNINGS = tuple(_WRAPPERS)
_ASKING = frozenset(
    {"named_modules", "modules", "named_parameters", "parameters", "named_buffers", "buffers", "_named_members", "<listcomp>"}
    | {"<dictcomp>", "<setcomp>", "<genexpr>", "_named_parameters", "_named_modules", "__call__"}
)  # functions that only pass a question on


def refuse_wrappers(name_of: Callable[[], str]) -> None:
    """For the methods that `_ASKING` names: raises if it is a wrapper that asks for modules or parameters.

    Args:
        name_of: says whose they are.

    Raises:
        RuntimeError: on every rank that wraps, and nothing has changed.
    """
    if torch.compiler.is_compiling():  # what is traced is a forward or a step, and frames can't be
        return
    frame = sys._getframe(1)
    while frame.f_code.co_name in _ASKING and frame.f_back is not None:
        frame = frame.f_back
    asking = frame.f_globals.get("__name__", "")
    if asking.startswith(_BEGINNINGS):
        wrapper = _named(asking)
        raise RuntimeError(
            f"{wrapper} around a sharded model ({name_of()}): zero3 gathers the parameters and reduces the gradients of its layers "
            f"itself, and {wrapper} would take each rank's slice for whole parameters. Train the model without the wrapper; wrap only "
            "modules that hold no sharded layer. Tools that wrap whatever they are given (Accelerator.prepare, Trainer, Fabric, Lightning) "
            "get the optimizer and the data loader without the model."
        )


def wrapper_in(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """What the first wrapper among named modules is called, with its name; None if there is none."""
    for name, module in modules:
        for kind in type(module).__mro__:
            if kind.__module__.startswith(_BEGINNINGS):
                return f"{_named(kind.__module__)} at {name!r}" if name else _named(kind.__module__)
    return None


def _named(module: str) -> str:
    return next(wrapper for beginning, wrapper in _WRAPPERS.items() if module.startswith(beginning))
