"""Converts Python values to JSON and back without a change. Other values are an error, and pickle
is never used.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from numbers import Integral
from types import UnionType
from typing import Any

import torch
from torch import Tensor, nn

__all__: list[str] = []

_TENSOR, _TUPLE, _ITEMS, _COUNTER = "$tensor", "$tuple", "$items", "$counter"
_SCALARS = (bool, int, float, str)


def integer(value: Any) -> int | None:
    """The int that an integer of any library is, such as numpy's. None: it is no integer."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def encode(
    value: Any, what: str, tensor: Callable[[Any], Any], tensors: type | UnionType = Tensor
) -> Any:
    """Converts `value` to what JSON can hold. Tuples, counters and keys that are not strings are
    marked.

    `tensor` converts what is of the classes `tensors`. `what` is the name of `value` in errors.

    Raises:
        TypeError: A value of another type. The error names the path to it.
    """
    if value is None or (isinstance(value, _SCALARS) and type(value).__module__ == "builtins"):
        return value
    # numpy.float64 is a float
    if isinstance(value, Integral | float | str) and type(value).__module__ == "numpy":
        return encode(value.item(), what, tensor)  # type: ignore[union-attr]
    if isinstance(value, tensors):
        return {_TENSOR: tensor(value)}

    def inner(held: Any, place: str) -> Any:
        return encode(held, place, tensor, tensors)

    if isinstance(value, list | tuple):
        listed = [inner(item, f"{what}[{index}]") for index, item in enumerate(value)]
        return listed if isinstance(value, list) else {_TUPLE: listed}
    if isinstance(value, dict):
        items = [
            (inner(key, f"a key of {what}"), inner(held, f"{what}[{key!r}]"))
            for key, held in value.items()
        ]
        if isinstance(value, Counter):
            return {_COUNTER: items}
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        return dict(items) if plain else {_ITEMS: items}
    raise TypeError(
        f"{what} is a {type(value).__module__}.{type(value).__qualname__}: checkpoints, and "
        "messages between ranks, hold None, bool, int, float, str, lists, tuples, dicts and "
        "tensors, and never a pickle. Give its parts instead, such as its state_dict()."
    )


def decode(value: Any, tensor: Callable[[Any], Any]) -> Any:
    """The inverse of `encode`. Dicts and tuples come back as plain ones. `tensor` is the inverse of
    `encode`'s `tensor`.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        return tensor(value[_TENSOR])
    if _TUPLE in value:
        return tuple(decode(item, tensor) for item in value[_TUPLE])
    if _ITEMS in value or _COUNTER in value:
        items = {
            decode(key, tensor): decode(held, tensor) for key, held in next(iter(value.values()))
        }
        return Counter(items) if _COUNTER in value else items
    return {key: decode(held, tensor) for key, held in value.items()}


def encode_scalar(value: Any, what: str) -> Any:
    """Works as `encode`, and writes a 0-dim tensor as its dtype, its value, and whether it was on a
    device other than the CPU.
    """
    return encode(value, what, lambda tensor: _scalar(tensor, what))


def decode_scalar(value: Any, device: torch.device | str) -> Any:
    """The inverse of `encode_scalar`. Tensors that were on a device other than the CPU are made on
    `device`.

    Raises:
        ValueError: A tensor's entry is not in the format that `encode_scalar` writes.
    """

    def tensor(found: Any) -> Tensor:
        if not isinstance(found, list) or len(found) != 3 or not isinstance(found[1], int | float):
            raise ValueError(
                "expected the dtype, the value and the place of a 0-dim tensor, found "
                f"{found!r:.80}"
            )
        return torch.tensor(
            found[1], dtype=dtype_named(str(found[0])), device=device if found[2] else "cpu"
        )

    return decode(value, tensor)


def decode_scalars(values: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    return {key: decode_scalar(value, device) for key, value in values.items()}


def _scalar(tensor: Tensor, what: str) -> list[Any]:
    if tensor.dim() or tensor.is_complex():
        raise TypeError(
            f"{what} is a tensor {tuple(tensor.shape)} of {tensor.dtype}; expected a real number, "
            "or a 0-dim tensor of one"
        )
    return [str(tensor.dtype).removeprefix("torch."), tensor.item(), tensor.device.type != "cpu"]


def dtype_named(name: str) -> torch.dtype:
    """`float32` -> torch.float32.

    Raises:
        ValueError: There is no dtype with that name.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r}: torch's are such as float32 and bfloat16")
    return found


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_of(dtype: torch.dtype) -> str:
    """Values are converted within a kind only. Float8 is one of its own: without its scales it
    means nothing.
    """
    if dtype == torch.float4_e2m1fn_x2 or name_of(dtype).startswith("bits"):
        return name_of(dtype)
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return "float8"
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "bool" if dtype == torch.bool else "integer"


def not_copied(dtype: torch.dtype) -> str | None:
    """Why torch can't copy tensors of `dtype`, in words that follow a name; None: it can."""
    if re.fullmatch(r"u?int[1-7]|qu?int.*", name_of(dtype)) is None:
        return None
    return (
        f"is {dtype}, which torch can't copy: keep its bytes in a tensor of torch.uint8, as "
        "tensor.view(torch.uint8) or int_repr() give it"
    )


def unreadable(value: Any) -> str | None:
    """Why `value` is no tensor whose values can be read as they lie, in words that follow its name;
    None: it is one.
    """
    if not isinstance(value, Tensor):
        return f"is a {type(value).__module__}.{type(value).__qualname__}, expected a torch.Tensor"
    if type(value) not in (Tensor, nn.Parameter) or type(value.data) is not Tensor:
        remedy = (
            "pass its full_tensor()"
            if hasattr(value, "full_tensor")
            else "pass a plain torch.Tensor"
        )
        return f"is a {type(value).__qualname__}: {remedy}"
    if value.is_meta:
        return "is on the meta device, so it has no values"
    if value.layout != torch.strided or value.is_quantized:
        return (
            "is "
            f"{'quantised' if value.is_quantized else str(value.layout).removeprefix('torch.')}, "
            "expected a dense tensor"
        )
    return not_copied(value.dtype)
