"""Casts what goes into a layer and comes out of it, as its policy says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..policy import ShardingPolicy
from .tree import map_tensors

__all__: list[str] = []


class Casting:
    """The casts at a layer's edges. They are recorded by autograd: gradients come back in the dtypes that the tensors had."""

    __slots__ = ("_inputs", "_output")

    def __init__(self, policy: ShardingPolicy) -> None:
        self._inputs = policy.param_dtype if policy.cast_forward_inputs else None
        self._output = policy.output_dtype

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args, kwargs) if self._inputs is None else (_cast(args, self._inputs), _cast(kwargs, self._inputs))

    def output(self, output: Any) -> Any:
        return output if self._output is None else _cast(output, self._output)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(cast, value)
