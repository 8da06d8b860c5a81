"""What modules answer while their parameters are released: methods that would find nothing, or a slice, say so instead."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from .parameters import named, own_modules, parameters_of, released_in

__all__: list[str] = []

IsLayer = Callable[[nn.Module], bool]

INSTEAD_OF_STATE_DICT = (
    "zero3.full_state_dict(model), or `with zero3.full_params(model, writeback=True):` around what reads and loads one, as peft's "
    "load_adapter does"
)
_GUARDED = "_zero3_guarded"  # in a module's __dict__: it belongs to a sharded model


class Override:
    """Stands in one module for its method `name`: `around(module, method, *args, **kwargs)` is called instead.

    It holds no module (a cycle would keep a deleted model's memory), and a copy of the module has the plain method.
    """

    def __init__(self, module: nn.Module, name: str, around: Callable[..., Any]) -> None:
        self._own: Callable[..., Any] | None = vars(module).get(name)
        self._plain: Callable[..., Any] = getattr(type(module), name)
        self._name = name
        self._module = weakref.ref(module)
        self._around = around
        functools.update_wrapper(self, self._own or self._plain)
        module.__dict__[name] = self

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own or functools.partial(self._plain, None))  # without self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            raise RuntimeError(f"the model that this {self._plain.__qualname__} belongs to is gone")
        return self._around(module, self._own or functools.partial(self._plain, module), *args, **kwargs)

    @property
    def __func__(self) -> Callable[..., Any]:
        """As of a bound method. torch.compile asks whether `named_parameters` is torch's own: then it takes addresses for fixed."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._own or MethodType(self._plain, memo[id(self._module())])

    def __reduce__(self) -> Any:
        return getattr, (self._module(), self._name)


def guard(module: nn.Module, is_layer: IsLayer, *, lists_chunks: bool = False) -> None:
    """Makes `module` refuse what would leave its released parameters out in silence, and new ones that would never be sharded.

    `lists_chunks`: its `parameters()` are the chunks.
    """
    refuse_new_parameters(module)
    Override(module, "_apply", _guarded_apply)
    module.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_before_load_state_dict)  # type: ignore[no-untyped-call]
    if not lists_chunks:
        Override(module, "named_parameters", functools.partial(_named_parameters, is_layer))


def refuse_new_parameters(module: nn.Module) -> None:
    """From now on it takes no parameters that are not sharded: see `_check_new_module`."""
    module.__dict__[_GUARDED] = True


def refuse(what: str, why: str, instead: str) -> NoReturn:
    raise RuntimeError(f"{what} of a sharded model: {why}. Use {instead}.")


def check_conversion(probe: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor], what: str) -> None:
    """Raises if `fn`, of `nn.Module._apply`, would give `what`, of the dtype and on the device of `probe`, another of either."""
    result = fn(probe)
    moved = result.is_shared() != result.is_cuda  # type: ignore[no-untyped-call]
    if moved or (result.dtype, result.device) != (probe.dtype, probe.device):
        refuse(
            f"converting {what} from {probe.dtype} on {probe.device} to {result.dtype} on {result.device}",
            "its chunks, gradients and optimizer state would no longer fit together",
            "device= and the module's dtype before wrapping",
        )


def _guarded_apply(module: nn.Module, apply: Callable[..., nn.Module], fn: Any, recurse: bool = True) -> nn.Module:
    for inner in module.modules():  # all of them before the first is converted
        for _, parameter in released_in(inner):
            check_conversion(torch.empty(1, dtype=parameter.dtype, device=parameter.device), fn, parameter.zero3_name)
    return apply(fn, recurse)


def _named_parameters(
    is_layer: IsLayer,
    module: nn.Module,
    method: Callable[..., Iterator[tuple[str, nn.Parameter]]],
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    """Released ones too, and first: a loop that freezes them, or an optimizer, raises with their names, and not over nothing in silence."""
    seen: set[int] = set()
    for name, inner in own_modules(module, is_layer, prefix) if recurse else [(prefix, module)]:
        for attribute, parameter in released_in(inner):
            if id(parameter) not in seen or not remove_duplicate:
                seen.add(id(parameter))
                yield f"{name}.{attribute}" if name else attribute, parameter
    yield from method(prefix, recurse, remove_duplicate)


def _before_state_dict(module: nn.Module, *_: object) -> None:
    if released_in(module):
        refuse("state_dict()", "a state dict of chunks has neither the names nor the shapes of the model", INSTEAD_OF_STATE_DICT)


def _before_load_state_dict(module: nn.Module, *_: object) -> None:
    if released_in(module):
        refuse("load_state_dict()", "the model's values lie in chunks on all ranks", "zero3.load_full_state_dict(model, state_dict)")


def _check_new_module(module: nn.Module, name: str, new: nn.Module | None) -> None:
    """Whatever is put into a sharded model brings no parameters of its own: those would be neither sharded, nor reduced, nor loaded."""
    if _GUARDED in vars(module) and isinstance(new, nn.Module):
        _check_strangers(module, [f"{name}.{inner}" for inner, parameter in new.named_parameters() if not _is_sharded(parameter)])


def _check_new_parameter(module: nn.Module, name: str, new: nn.Parameter | None) -> None:
    known = {known for known, _ in parameters_of(module)} if _GUARDED in vars(module) else set()  # replaced: told of when it is shown
    if _GUARDED in vars(module) and new is not None and name not in known and not _is_sharded(new):
        _check_strangers(module, [name])


def _check_strangers(module: nn.Module, names: list[str]) -> None:
    if names:
        raise RuntimeError(
            f"this {type(module).__name__} belongs to a sharded model, and was to get parameters that are not: {named(names)}. Each rank "
            "would train them alone, and no checkpoint would hold them. Change the model, or add adapters (peft's get_peft_model, "
            "add_adapter, load_adapter), before it is sharded."
        )


def _is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "zero3_state")


# torch knows no such hooks for one module alone. These look at marked modules only.
nn.modules.module.register_module_module_registration_hook(_check_new_module)
nn.modules.module.register_module_parameter_registration_hook(_check_new_parameter)
