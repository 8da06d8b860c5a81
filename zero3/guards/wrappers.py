"""Refuses wrappers of other libraries, which would broadcast, reduce or shard a sharded model a
second time.

Before a wrapper changes anything, it asks the model for its modules or parameters. These methods
are replaced, and look at their caller in the call stack. So nothing in torch is patched, and a
sharded model is also found inside another model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import MappingProxyType

import torch
from torch import nn
from torch.nn import functional

__all__: list[str] = []

# Name of the Python module, or its beginning, that calls these methods or defines the wrapper's
# class -> the wrapper's name.
_WRAPPERS = MappingProxyType(
    {
        "torch.nn.parallel.distributed": "DistributedDataParallel",
        "torch.nn.parallel.replicate": "DataParallel",
        "torch.nn.parallel.data_parallel": "DataParallel",
        "torch.distributed.fsdp._fully_shard.": "fully_shard (FSDP2)",
        "torch.distributed.fsdp._init_utils": "FullyShardedDataParallel (FSDP1)",
        "torch.distributed.fsdp._wrap_utils": "FullyShardedDataParallel (FSDP1)",
        "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel (FSDP1)",
        "torch.distributed._composable.replicate": "replicate (composable DistributedDataParallel)",
        "torch.distributed.tensor._api": "distribute_module (tensor parallelism)",
        "torch.distributed.tensor.parallel.": "parallelize_module (tensor parallelism)",
        "deepspeed.runtime.": "DeepSpeed",
        "deepspeed.inference.": "DeepSpeed",
        "deepspeed.utils.debug": "DeepSpeed",  # the first caller inside deepspeed.initialize
    }
)
_BEGINNINGS = tuple(_WRAPPERS)
DIVIDES = (  # what an error about another way says, after its name
    "a sharded model: it exchanges in another way, and does not know that zero3 averages over all "
    "ranks. Take a mesh with sp, or sequence_parallel=n in Zero3Trainer and Zero3Accelerator, to "
    "divide sequences over ranks (docs/long.md)"
)
ATTENTION = functional.scaled_dot_product_attention  # torch's own
_ASKING = frozenset(
    {
        "named_modules",
        "modules",
        "named_parameters",
        "parameters",
        "named_buffers",
        "buffers",
        "_named_members",
        "<listcomp>",
    }
    | {"<dictcomp>", "<setcomp>", "<genexpr>", "_named_parameters", "_named_modules", "__call__"}
)  # functions that pass the call on; the caller is the first frame that is none of these


def refuse_wrappers(name_of: Callable[[], str]) -> None:
    """Called by the methods in `_ASKING`. Raises if their caller is a wrapper.

    Args:
        name_of: Returns the name of the sharded model or layer, for the error.

    Raises:
        RuntimeError: A wrapper asks for modules or parameters. Every rank that wraps raises it, and
            nothing has changed.
    """
    if torch.compiler.is_compiling():  # torch.compile can't trace frames, and traces no wrapper
        return
    frame = sys._getframe(1)
    while frame.f_code.co_name in _ASKING and frame.f_back is not None:
        frame = frame.f_back
    asking = frame.f_globals.get("__name__", "")
    if asking.startswith(_BEGINNINGS):
        wrapper = _named(asking)
        raise RuntimeError(
            f"{wrapper} around a sharded model ({name_of()}): zero3 gathers the parameters and "
            f"reduces the gradients of its layers itself, and {wrapper} would take each rank's "
            "slice for whole parameters. Train the model without the wrapper; wrap only modules "
            "that hold no sharded layer. For Accelerator, Trainer and TRL's trainers there are "
            "others in zero3.integrations (docs/integrations.md); give any other tool that "
            "wraps its arguments the optimizer and the data loader, and not the model."
        )


def wrapper_in(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """The first wrapper among named modules, as a text with its place in the model. None if there
    is none.
    """
    for name, module in modules:
        for kind in type(module).__mro__:
            if kind.__module__.startswith(_BEGINNINGS):
                return f"{_named(kind.__module__)} at {name!r}" if name else _named(kind.__module__)
    return None


def refuse_context_parallel() -> None:
    """
    Raises:
        RuntimeError: torch's `context_parallel` has replaced the attention.
    """
    if "context_parallel" in functional.scaled_dot_product_attention.__module__:
        raise RuntimeError(f"torch's context_parallel around {DIVIDES}")


def refuse_ulysses(model: nn.Module) -> None:
    """
    Raises:
        ValueError: DeepSpeed has replaced the model's attention in transformers' registry.
    """
    try:
        name = model.config.get_text_config()._attn_implementation  # type: ignore[operator,union-attr]
    except (AttributeError, ValueError):  # no model of transformers', or of several texts
        return
    library = sys.modules.get("transformers.modeling_utils")
    registry = getattr(library, "ALL_ATTENTION_FUNCTIONS", {})
    if (getattr(registry.get(name), "__module__", None) or "").startswith("deepspeed."):
        raise ValueError(f"DeepSpeed's UlyssesSPAttentionHF (registered as {name!r}) in {DIVIDES}")


def _named(module: str) -> str:
    return next(wrapper for beginning, wrapper in _WRAPPERS.items() if module.startswith(beginning))
