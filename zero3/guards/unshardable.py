"""Refuses modules and parameters that can't be sharded, before anything has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..core.released import ReleasedParameter
from ..core.sites import ParameterSites

__all__: list[str] = []


def check_modules(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Raises ValueError, with its name, if one of `modules` was compiled by torch.jit."""
    for name, module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"{f'module {name!r}' if name else 'the module'} is a {type(module).__name__}, "
                "which holds its parameters in C++, where no layer can put others: shard the "
                "module before torch.jit. Take torch.compile for speed, and script what was trained"
            )


def check_parameters(
    parameters: list[ParameterSites],
    dtype: torch.dtype | None,
    label: str,
    stored: Callable[[torch.dtype], torch.dtype] | None = None,
) -> None:
    """Raises ValueError, with the parameter's name, if one of `parameters` can't be sharded.
    Changes nothing. `stored`: the dtype of a trainable chunk of parameters of a dtype.
    None: the same.
    """
    for sites in parameters:
        parameter = sites.parameter
        if isinstance(parameter, ReleasedParameter):
            raise ValueError(
                f"parameter {sites.name!r} of {label} is already sharded, as "
                f"{parameter.zero3_name}. Wrap a module once; if the parameter is tied across "
                "layers, put both into one Zero3Layer, or use zero3.shard(model); if two models "
                "share it, zero3.shard(nn.ModuleList([first, second]))."
            )
        if hasattr(parameter, "ds_id"):
            raise ValueError(
                f"parameter {sites.name!r} of {label} has been partitioned by DeepSpeed "
                "(zero.Init), which keeps its values: build the "
                'model without it, on torch.device("meta") if it does not fit'
            )
        if is_lazy(parameter):
            raise ValueError(
                f"parameter {sites.name!r} of {label} has no shape yet, as lazy modules have none: "
                "run a forward first"
            )
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
            raise ValueError(
                f"parameter {sites.name!r} is a {type(parameter).__name__} (data: "
                f"{type(parameter.data).__name__}), expected a plain torch.nn.Parameter: a "
                "subclass holds more than flat values, such as codes with their scales. Build "
                "the model of plain parameters. ShardingPolicy(quantize=...) stores frozen ones "
                "in fewer bits, gather_format=... sends those that train in fewer."
            )
        updated = parameter.dtype if stored is None else stored(parameter.dtype)
        if dtype is not None and parameter.requires_grad and updated != dtype:
            raise ValueError(
                f"trainable parameter {sites.name!r} is {updated}, expected "
                f"dtype={dtype}: dtype checks what the optimizer updates, it converts nothing. "
                "Convert the module before wrapping, or drop the argument."
            )
    for sites in parameters:
        parameter = sites.parameter
        if _has_memory(parameter) and _overlaps_itself(parameter):
            raise ValueError(
                f"parameter {sites.name!r} overlaps itself (shape {tuple(parameter.shape)}, "
                f"stride {parameter.stride()}): a tensor with several names for one element can't "
                "be trained. Use .clone() before wrapping."
            )
    check_overlap(parameters)


class Named(Protocol):
    """A parameter and its name in errors."""

    @property
    def name(self) -> str: ...

    @property
    def parameter(self) -> Tensor: ...


def check_overlap(parameters: Iterable[Named]) -> None:
    """Raises ValueError, with both names, if two of `parameters` share an element in memory."""
    spans = []
    for sites in parameters:
        parameter = sites.parameter
        if not _has_memory(parameter):
            continue
        last = sum(
            (size - 1) * stride
            for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
        )
        start = parameter.data_ptr()
        spans.append((start, start + (last + 1) * parameter.element_size(), sites))
    # spans that end behind the start of the present one
    reached: list[tuple[int, Named]] = []
    for start, stop, sites in sorted(spans, key=lambda span: span[:2]):
        reached = [(end, other) for end, other in reached if end > start]
        for _, other in reached:
            # every element is compared, because ranges may overlap without a shared one
            # (interleaved columns of one buffer)
            if torch.isin(_addresses(other.parameter), _addresses(sites.parameter)).any():
                raise ValueError(
                    f"parameters {other.name!r} and {sites.name!r} overlap in memory but are two "
                    "objects. Make them one Parameter if they are tied, or .clone() one of them."
                )
        reached.append((stop, sites))


def _has_memory(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.numel() > 0


def _overlaps_itself(tensor: Tensor) -> bool:
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return len(set(_addresses(tensor).tolist())) < tensor.numel()
        extent += (size - 1) * stride
    return False


def _addresses(tensor: Tensor) -> Tensor:
    """The address of every element, in bytes."""
    index = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        index = index[..., None] + torch.arange(size) * stride * tensor.element_size()
    return index.flatten()
