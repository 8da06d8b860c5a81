"""The class of a parameter while its layer is released: its metadata can be read, its values can't.

A parameter stays one object for life. While it is released, its class is `ReleasedParameter`, and
its data is one NaN expanded to its shape. So every operation on the object comes through
`__torch_function__`, even if user code kept the object.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .autograd import as_plain_tensors

__all__: list[str] = []

_METADATA_PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "ndim", "layout", "names", "grad_fn", "is_cuda",
    "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_mkldnn", "is_nested", "itemsize",
    "nbytes", "_backward_hooks",
    "output_nr", "_version",
)  # fmt: skip
METADATA = frozenset(
    getattr(Tensor, name).__get__ for name in _METADATA_PROPERTIES if hasattr(Tensor, name)
) | {
    Tensor.numel, Tensor.nelement, Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.element_size,
    Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.__hash__, Tensor.type, torch.numel,
    torch.is_floating_point,
    # untyped_storage lets tools count memory: it is the stand-in's
    torch.is_complex, torch.is_tensor, Tensor.untyped_storage,
}  # fmt: skip
# what optimizers ask first: in a step, in zero_grad, when they are made
_OF_OPTIMIZERS = ("grad", "is_leaf")
_TO_OPTIMIZERS = (
    "An optimizer that holds it must be made after the model was sharded, from "
    "zero3.get_trainable_chunk(model) or zero3.param_groups(model, options). A part of a sharded "
    "model has no zero_grad() of its own: zero the model's gradients, or the optimizer's. "
)


class ReleasedParameter(nn.Parameter):
    """A parameter whose values are in the chunks of all ranks. An object gets this class by an
    assignment to `__class__`.
    """

    zero3_state: Callable[[], Any]  # its layer, not held
    zero3_name: str  # "weight of layer '0' (Linear)", set when the layer is made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in METADATA:
            with as_plain_tensors():
                return func(*args, **(kwargs or {}))
        if func == Tensor.is_leaf.__get__ and not _asked_by("torch.optim.optimizer"):  # type: ignore[attr-defined]
            return True
        if func in (Tensor.__repr__, Tensor.__format__):
            return args[0]._describe()
        if func in (Tensor.requires_grad_, Tensor.requires_grad.__set__):  # type: ignore[attr-defined]
            return args[0]._set_requires_grad(*args[1:], **(kwargs or {}))
        refuse_values(_first_released((args, kwargs)), func_name(func))

    def _set_requires_grad(self, requires_grad: bool = True) -> ReleasedParameter:
        """Remembered, for tools switch adapters off and on again; the next forward with gradients
        looks at it.
        """
        with as_plain_tensors():
            self.requires_grad_(requires_grad)
        if (state := self.zero3_state()) is not None:
            state.parameters.look_at_toggles()
        return self

    def _describe(self) -> str:
        with as_plain_tensors():
            return (
                f"Parameter(released, shape={tuple(self.shape)}, dtype={self.dtype}, "
                f"requires_grad={self.requires_grad})"
            )

    def __repr__(self, **kwargs: object) -> str:  # type: ignore[override]
        return self._describe()

    def __deepcopy__(self, memo: object) -> NoReturn:
        refuse_values(self, "deepcopy")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_values(self, "pickle")


def _asked_by(module: str) -> bool:
    """Whether the operation is one of `module`'s. An optimizer asks nothing but `is_leaf` of what
    it is given; it must not take this.
    """
    return bool(sys._getframe(2).f_globals.get("__name__") == module)


def _first_released(arguments: Any) -> ReleasedParameter | None:
    if isinstance(arguments, ReleasedParameter):
        return arguments
    values = (
        arguments.values()
        if isinstance(arguments, Mapping)
        else arguments
        if isinstance(arguments, (tuple, list))
        else ()
    )
    return next((found for value in values if (found := _first_released(value)) is not None), None)


def func_name(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):  # take the property's name, such as `data`
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name


def refuse_values(parameter: ReleasedParameter | None, operation: str) -> NoReturn:
    name = getattr(parameter, "zero3_name", "a parameter")
    advice = _TO_OPTIMIZERS if operation in _OF_OPTIMIZERS else ""
    raise RuntimeError(
        f"{operation}: {name} is released, its values lie in chunks on all ranks. {advice}Read it "
        "inside `with zero3.full_params(module):`, change it there with writeback=True, compute "
        "with it outside a forward inside `with zero3.resident(model):` (every rank enters them) "
        "or in a method that zero3.register_forward_method knows, or work on the chunks that "
        "get_trainable_chunk() returns."
    )
