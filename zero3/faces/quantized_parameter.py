"""A quantised parameter while its layer computes. Operations get its full values, one matrix at a
time, and graphs don't keep them.

As a released parameter it is one object for life, and its data is a NaN, stretched to its shape.
While it is shown its class is `QuantizedParameter`, so every operation on it comes through
`__torch_function__`. A view of it (`weight.t()`, `experts[3]`) is a `QuantizedView`, which knows
how it was made. An operation that computes gets the values; what it saves of them for backward is
replaced by the way in which they were made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from ..core.autograd import as_plain_tensors, grouped_products, transforms_under_way
from ..core.flat import not_a_number
from ..core.released import METADATA, func_name
from .recipes import InUse, Operation, Recipe, unpack

__all__: list[str] = []

Function = Callable[..., Any]

_PRODUCTS = frozenset({
    functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm,
    Tensor.mm, torch.bmm, Tensor.bmm,
    torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm,
})  # fmt: skip
_COMPUTING = _PRODUCTS | {
    *grouped_products(),
    functional.embedding,
    torch.add,
    Tensor.add,
    Tensor.__add__,
    Tensor.__radd__,
}
_VIEWING = frozenset({
    torch.t, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__,  # type: ignore[attr-defined]
    torch.transpose, Tensor.transpose, torch.permute, Tensor.permute,
    torch.unsqueeze, Tensor.unsqueeze, torch.squeeze, Tensor.squeeze, Tensor.view, torch.reshape,
    Tensor.reshape, torch.flatten,
    Tensor.flatten, Tensor.expand, torch.narrow, Tensor.narrow, torch.unbind, Tensor.unbind,
    torch.chunk, Tensor.chunk, torch.split,
    Tensor.split, torch.detach, Tensor.detach, Tensor.contiguous,
})  # fmt: skip
_INDEXING = frozenset({Tensor.__getitem__, torch.select, Tensor.select})
_CASTING = frozenset(
    {Tensor.to, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double}
)
_DESCRIBING = METADATA | {
    Tensor.stride, Tensor.is_contiguous, Tensor.storage_offset,
    Tensor.is_leaf.__get__, Tensor.grad.__get__,  # type: ignore[attr-defined, union-attr]
}  # fmt: skip


class _Quantized(Tensor):
    """What a quantised parameter and its views have in common."""

    zero3_recipe: Recipe

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _COMPUTING:
            return _computed(func, args, kwargs)
        if (
            func in _DESCRIBING
            or func_name(func).startswith(("is_", "_is_"))
            or (func in _CASTING and not isinstance(args[0], _Quantized))
        ):
            with as_plain_tensors():
                return func(*args, **kwargs)
        if func in (Tensor.__repr__, Tensor.__format__):
            return _described(args[0])
        if func in _VIEWING:
            return _viewed(func, args[0], tuple(args[1:]), kwargs)
        if func in _INDEXING:
            return _indexed(func, args[0], tuple(args[1:]), kwargs)
        if func in _CASTING:
            return _cast(func, args[0], tuple(args[1:]), kwargs)
        if func is Tensor.__iter__:
            return iter(args[0].unbind())
        if (
            func in (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
            and not (*args[1:], *kwargs.values(), True)[0]
        ):
            return args[0]  # it does not train anyway
        _refuse(func_name(func), (*args, *kwargs.values()))

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        return _described(self)

    def __deepcopy__(self, memo: object) -> NoReturn:
        _refuse("deepcopy", (self,))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        _refuse("pickle", (self,))


class QuantizedParameter(_Quantized, nn.Parameter):
    """A parameter of a fetched layer, whose values are codes. An object gets this class by an
    assignment to `__class__`.
    """


class QuantizedView(_Quantized):
    """A view of a quantised parameter, or a cast of one."""


def _computed(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Computes with the values of the quantised tensors among the arguments."""
    if func in _PRODUCTS:
        _check_product(func, args)
    in_use = InUse()

    def plain(item: Any) -> Any:
        if not isinstance(item, _Quantized):
            return item
        recipe = item.zero3_recipe
        device = item.device.type
        if (
            func in _PRODUCTS
            and device != "meta"
            and torch.is_autocast_enabled(device)
            and item.dtype != torch.float64
        ):
            # autocast's own copy would be saved
            recipe = replace(recipe, dtype=torch.get_autocast_dtype(device))
        return in_use.add(recipe)

    try:
        values = [plain(item) for item in args]
        options = {name: plain(item) for name, item in kwargs.items()}
        if not torch.is_grad_enabled() or transforms_under_way():  # torch.func allows no hooks
            return func(*values, **options)
        with saved_tensors_hooks(in_use.pack, unpack):
            return func(*values, **options)
    finally:
        in_use.made.clear()  # the graph keeps the hooks


def _check_product(func: Function, args: Sequence[Any]) -> None:
    """Raises where torch would multiply with a copy of the weight, and save the copy: several
    matrices, repeated for a longer batch.
    """
    ranks = [item.dim() for item in args if isinstance(item, Tensor)]
    if func not in (functional.linear, torch.addmm, Tensor.addmm) and any(
        isinstance(item, _Quantized) and 2 < item.dim() < max(ranks) for item in args
    ):
        _refuse(f"{func_name(func)} of {max(ranks)} with fewer dimensions", args)


def _view(plain: Tensor, recipe: Recipe) -> QuantizedView:
    view = plain.as_subclass(QuantizedView)
    view.zero3_recipe = recipe
    return view


def _viewed(
    func: Function, tensor: _Quantized, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with as_plain_tensors():
        made = (
            tensor.view_as(tensor) if func is Tensor.contiguous else func(tensor, *args, **kwargs)
        )
    recipe = tensor.zero3_recipe
    if isinstance(made, Tensor):
        return _view(made, recipe.then(Operation(func, args, kwargs)))
    recipes = [recipe.then(Operation(func, args, kwargs, place)) for place in range(len(made))]
    if func in (torch.unbind, Tensor.unbind) and not args and not kwargs:
        recipes = [recipe.one_matrix(place) or each for place, each in enumerate(recipes)]
    return tuple(_view(each, how) for each, how in zip(made, recipes, strict=True))


def _indexed(
    func: Function, tensor: _Quantized, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A view by integers and slices. (Indices in a tensor would gather a copy, which the graph
    would save.)
    """
    args = tuple(_as_integers(item) for item in args)
    if any(
        isinstance(item, Tensor)
        for index in args
        for item in (index if isinstance(index, tuple) else (index,))
    ):
        _refuse("indexing with a tensor of indices", (tensor,))
    with as_plain_tensors():
        made = func(tensor, *args, **kwargs)
    first = (
        args[0]
        if func is Tensor.__getitem__
        else args[1]
        if len(args) == 2 and args[0] == 0
        else None
    )
    whole = (
        tensor.zero3_recipe.one_matrix(first)
        if isinstance(first, int) and not isinstance(first, bool)
        else None
    )
    return _view(made, whole or tensor.zero3_recipe.then(Operation(func, args, kwargs)))


def _as_integers(index: Any) -> Any:
    """An index without 0-dim tensors, as torch reads it."""
    if isinstance(index, tuple):
        return tuple(_as_integers(item) for item in index)
    is_number = (
        isinstance(index, Tensor)
        and index.dim() == 0
        and not index.is_floating_point()
        and index.dtype != torch.bool
    )
    return int(index) if is_number else index


def _cast(
    func: Function, tensor: _Quantized, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Quantized:
    with as_plain_tensors():
        cast = func(torch.empty((), dtype=tensor.dtype, device=tensor.device), *args, **kwargs)
    if cast.device != tensor.device:
        _refuse(f"moving to {cast.device}", (tensor,))
    if cast.dtype == tensor.dtype:
        return tensor
    stretched = not_a_number(cast.dtype, cast.device).expand(tensor.shape)
    return _view(stretched, tensor.zero3_recipe.then(Operation(Tensor.to, (cast.dtype,), {})))


def _described(tensor: Tensor) -> str:
    weight = tensor.zero3_recipe.weight  # type: ignore[attr-defined]
    return (
        f"{type(tensor).__name__}({weight.format_name}, shape={tuple(tensor.shape)}, "
        f"dtype={tensor.dtype})"
    )


def _refuse(operation: str, items: Sequence[Any]) -> NoReturn:
    found = [
        item
        for value in items
        for item in (value if isinstance(value, (list, tuple)) else (value,))
        if isinstance(item, _Quantized)
    ]
    weight = found[0].zero3_recipe.weight if found else None
    raise RuntimeError(
        f"{operation}: {weight.name if weight is not None else 'a parameter'} is quantised as "
        f"{weight.format_name if weight else 'codes'}, and this operation has no quantised form: "
        "linear, matmul, mm, bmm, addmm, baddbmm, grouped_mm, embedding and add have one, and so "
        "have views. Leave the parameter out (select= of the format), read its values inside "
        "`with zero3.full_params(module):`, and merge adapters with zero3.save_merged."
    )
