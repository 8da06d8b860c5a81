"""What compute does between a step's transfers: floating-point operations and bytes of each
operation, as torch's dispatcher sees it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import flop_counter

from ..core.autograd import tensors_in

__all__: list[str] = []

_ATEN = torch.ops.aten
# They read as much of a table as they make.
_LOOKUPS = frozenset({_ATEN.embedding, _ATEN.index_select, _ATEN.gather, _ATEN.index})
_OVERWRITING = ("copy_", "zero_", "fill_")  # what was there is not read


class Work(NamedTuple):
    """One operation, or several that only move bytes."""

    flops: int
    nbytes: int  # read and written
    narrow: int  # the smallest dimension of a matrix product; 0: it is none
    kernels: int  # how many kernels a device starts for it

    def times(self, count: float) -> Work:
        """The same, so many times."""
        if count == 1:
            return self
        numbers = (self.flops, self.nbytes, self.kernels)
        flops, nbytes, kernels = (round(count * each) for each in numbers)
        return Work(flops, nbytes, self.narrow, kernels)


def work_of(func: Any, args: Sequence[Any], result: Any) -> Work | None:
    """The work of an operation on meta tensors. None: it only looks at memory in another way, or
    allocates.
    """
    if func.is_view or any(word in func.__name__ for word in ("empty", "detach", "_unsafe_view")):
        return None
    nbytes = _moved(func, args, result)
    # torch 2.11 counts none with grouped heads, and no version the CPU's
    if func.namespace == "aten" and "dot_product" in func.__name__:
        flops = _computed(func, args) * _attention(func, args)
        # what narrow heads cost was fitted to GPUs
        return Work(int(flops), nbytes, 0 if "cpu" in func.__name__ else _narrow(func, args), 1)
    count: Callable[..., int] | None = flop_counter.flop_registry.get(func.overloadpacket)
    if count is None:
        return Work(0, nbytes, 0, 1)
    return Work(count(*args, out_val=result), nbytes, _narrow(func, args), 1)


def _moved(func: Any, args: Sequence[Any], result: Any) -> int:
    """The bytes that a device's kernel reads and writes."""
    given = [
        (leaf, argument.alias_info is not None and argument.alias_info.is_write)
        for argument, value in zip(func._schema.arguments, args, strict=False)
        for leaf in tensors_in(value)
    ]
    known = {id(leaf) for leaf, _ in given}
    made = sum(_nbytes(leaf) for leaf in tensors_in(result) if id(leaf) not in known)
    if func.overloadpacket in _LOOKUPS:
        return 2 * made
    if func.overloadpacket is _ATEN.nll_loss_forward:  # one number of each row
        return 2 * _nbytes(args[1])
    if func.overloadpacket is _ATEN.nll_loss_backward:  # of its input only the shape
        return made
    overwrites = func.overloadpacket.__name__.endswith(_OVERWRITING)
    return made + sum(
        _nbytes(leaf) * (writes + (not (writes and overwrites))) for leaf, writes in given
    )


def _nbytes(tensor: Tensor) -> int:
    """Its bytes on the device; of an expanded one no more than it has."""
    if not tensor.is_meta:
        return 0
    own = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(own) * tensor.dtype.itemsize


def _given(func: Any, args: Sequence[Any]) -> dict[str, Any]:
    return dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))


def _narrow(func: Any, args: Sequence[Any]) -> int:
    """The smallest dimension of a product; of attention's, the size of a head."""
    query = _given(func, args).get("query")
    if query is not None:
        return int(query.shape[-1])
    matrices = [leaf for leaf in tensors_in(args) if leaf.is_meta and leaf.dim() >= 2]
    return min((size for leaf in matrices for size in leaf.shape[-2:]), default=0)


def _attention(func: Any, args: Sequence[Any]) -> int:
    """Two products in forward, five in backward, of all pairs: as torch counts them."""
    backward, given = "backward" in func.__name__, _given(func, args)
    query, size = given["query"], given["value"].shape[-1]
    sizes = 3 * query.shape[-1] + 2 * size if backward else query.shape[-1] + size
    return int(2 * math.prod(query.shape[:-1]) * given["key"].shape[-2] * sizes)


def _computed(func: Any, args: Sequence[Any]) -> float:
    """The share of all pairs of tokens that the kernel of a causal attention computes: it leaves
    out what it would mask. 1: all.
    """
    given = _given(func, args)
    if not given.get("is_causal"):
        return 1.0
    rows, columns = given["query"].shape[-2], given["key"].shape[-2]
    square = min(rows, columns)
    return float((square * (square + 1) / 2 + (rows - square) * columns) / (rows * columns))


def merged(works: list[Any], work: Work) -> None:
    """Appends `work`; what only moves bytes is added to what did so before."""
    last = works[-1] if works else None
    if isinstance(last, Work) and not work.flops and not last.flops:
        works[-1] = Work(0, last.nbytes + work.nbytes, 0, last.kernels + work.kernels)
    else:
        works.append(work)
