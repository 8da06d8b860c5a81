"""Replaces methods of modules that would silently leave out released parameters: these methods
raise instead.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from ..core.parameters import parameters_of, released_in
from ..modules import WRAPPED, dotted, named, own_modules, plain_modules
from .compiled import compile_in_parts, ends_graphs, leave_untraced
from .wrappers import refuse_wrappers

__all__: list[str] = []

IsLayer = Callable[[nn.Module], bool]

_OR_WHOLE = (
    "or `with zero3.full_params(model, writeback=True):` around what reads and loads one, as "
    "peft's load_adapter does"
)
GUARDED = "_zero3_guarded"  # in a module's __dict__: it belongs to a sharded model
IN_MODEL = "_zero3_in_model"  # in a layer's __dict__, if the layer has a place in another module


class Override:
    """Replaces the method `name` of one module: a call runs `around(module, method, *args,
    **kwargs)`.

    It refers to the module weakly, because a cycle would keep a deleted model's memory. A copy of
    the module has the plain method. `default` is the plain method of classes that have none.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        around: Callable[..., Any],
        *,
        default: Callable[..., Any] | None = None,
    ) -> None:
        self._own: Callable[..., Any] | None = vars(module).get(name)
        self._plain: Callable[..., Any] = (
            getattr(type(module), name, default) if default else getattr(type(module), name)
        )
        self._name = name
        self._module = weakref.ref(module)
        self.around = around
        # whose attributes are its own; a function's are what others have noted on it
        outside = isinstance(self._own, Override)
        functools.update_wrapper(
            self, self._own or self._plain, updated=() if outside else functools.WRAPPER_UPDATES
        )
        self._put(module, self)

    def runs(self, around: Callable[..., Any]) -> bool:
        return self.around is around

    def undo(self) -> None:
        """The module has again what it had before. It must be the last one of that name."""
        if (module := self._module()) is not None:
            self._put(module, self._own)

    def _put(self, module: nn.Module, what: Callable[..., Any] | None) -> None:
        if what is None:
            del module.__dict__[self._name]
        else:
            module.__dict__[self._name] = what

    @property
    def __signature__(self) -> inspect.Signature:
        # leaves out `self`
        return inspect.signature(self._own or functools.partial(self._plain, None))

    @ends_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if module is None:
            raise RuntimeError(f"the model that this {self._plain.__qualname__} belongs to is gone")
        return self.around(
            module, self._own or functools.partial(self._plain, module), *args, **kwargs
        )

    @property
    def __func__(self) -> Callable[..., Any]:
        """An attribute of bound methods: a function that takes the module first. Tools that wrap
        methods read it.

        torch.compile reads it too: it takes parameters' addresses as fixed only if
        `named_parameters` is torch's own function.
        """
        return lambda module, /, *args, **kwargs: self(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._own or MethodType(self._plain, memo[id(self._module())])

    def __reduce__(self) -> Any:
        missing = () if hasattr(type(self._module()), self._name) else (self._plain,)
        return getattr, (self._module(), self._name, *missing)


def guard(module: nn.Module, is_layer: IsLayer, *, lists_chunks: bool = False) -> None:
    """Replaces methods of `module` that would silently leave out released parameters, and refuses
    parameters that are new.

    `lists_chunks`: the module's `parameters()` are the chunks, and stay as they are.
    """
    guard_layer(module)
    Override(module, "_apply", _guarded_apply)
    # torch.distributed.checkpoint.state_dict asks every module for it, before anything else
    Override(module, "_fqn_modifiers", _before_distributed_state_dict, default=_no_modifiers)
    module.register_state_dict_pre_hook(_before_state_dict)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_before_load_state_dict)  # type: ignore[no-untyped-call]
    if lists_chunks:
        Override(module, "named_modules", _named_modules)
    else:
        Override(module, "named_parameters", functools.partial(_named_parameters, is_layer))


def _no_modifiers(module: nn.Module | None = None) -> dict[str, Any]:
    """Stands for `_fqn_modifiers` in a class without it. In an unpickled module it is called as a
    function, without `module`.
    """
    return {}


def guard_layer(module: nn.Module) -> None:
    """Makes a layer refuse parameters that are not sharded (see `_check_new_module`), and compile
    around the layers in it.
    """
    module.__dict__[GUARDED] = True
    leave_untraced()  # it may have been compiled before
    Override(module, "compile", compile_in_parts)


def refuse_merges(model: nn.Module) -> None:
    """Makes peft's modules around a quantised weight refuse to merge into it, because it would have
    to be quantised again.
    """
    for module in plain_modules(model):
        asked = getattr(type(module), "get_base_layer", None)
        base = module.get_base_layer() if callable(asked) else None  # type: ignore[operator]
        if isinstance(base, nn.Module) and any(
            hasattr(parameter, "zero3_recipe") for _, parameter in parameters_of(base)
        ):
            Override(module, "merge", _refuse_merge)


def _refuse_merge(
    module: nn.Module, merge: Callable[..., None], /, *args: Any, **kwargs: Any
) -> NoReturn:
    refuse(
        "merging adapters",
        f"the base of this {type(module).__name__} is quantised, and would have to be quantised "
        "again",
        "zero3.save_merged(model, directory), which writes the merged model",
    )


def refuse(what: str, why: str, instead: str) -> NoReturn:
    raise RuntimeError(f"{what} of a sharded model: {why}. Use {instead}.")


def check_conversion(
    probe: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor], what: str
) -> None:
    """Raises if `fn`, an argument of `nn.Module._apply`, would change the dtype or the device of
    `what`. `probe` has both.
    """
    result = fn(probe)
    moved = result.is_shared() != result.is_cuda  # type: ignore[no-untyped-call]
    if moved or (result.dtype, result.device) != (probe.dtype, probe.device):
        refuse(
            f"converting {what} from {probe.dtype} on {probe.device} to {result.dtype} on "
            f"{result.device}",
            "its chunks, gradients and optimizer state would no longer fit together",
            "device= and the module's dtype before wrapping",
        )


def _guarded_apply(
    module: nn.Module, apply: Callable[..., nn.Module], fn: Any, recurse: bool = True
) -> nn.Module:
    for inner in plain_modules(module):  # check all before the first is converted
        for _, parameter in released_in(inner):
            probe = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
            check_conversion(probe, fn, parameter.zero3_name)
    return apply(fn, recurse)


def _named_modules(
    module: nn.Module, method: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Refuses wrappers here too, because one that visits modules in turn would change the root's
    chunks before it finds a layer.
    """
    refuse_wrappers(lambda: f"the root ({type(module).__name__})")
    return method(*args, **kwargs)


def _named_parameters(
    is_layer: IsLayer,
    module: nn.Module,
    method: Callable[..., Iterator[tuple[str, nn.Parameter]]],
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields released parameters first, then the others. So a loop that freezes parameters raises
    with a name, and is not empty.
    """
    refuse_wrappers(
        lambda: next(
            (parameter.zero3_name for _, parameter in released_in(module)), type(module).__name__
        )
    )
    seen: set[int] = set()
    for name, inner in own_modules(module, is_layer, prefix) if recurse else [(prefix, module)]:
        for attribute, parameter in released_in(inner):
            if id(parameter) not in seen or not remove_duplicate:
                seen.add(id(parameter))
                yield dotted(name, attribute), parameter
    yield from method(prefix, recurse, remove_duplicate)


def refuse_state_dict() -> NoReturn:
    instead = f"zero3.full_state_dict(model), {_OR_WHOLE}"
    refuse(
        "state_dict()",
        "a state dict of chunks has neither the names nor the shapes of the model",
        instead,
    )


def refuse_load_state_dict() -> NoReturn:
    instead = f"zero3.load_full_state_dict(model, state_dict), {_OR_WHOLE}"
    refuse("load_state_dict()", "the model's values lie in chunks on all ranks", instead)


def _before_state_dict(module: nn.Module, *_: object) -> None:
    if released_in(module):
        refuse_state_dict()


def _before_distributed_state_dict(
    module: nn.Module, method: Callable[[], dict[str, str]]
) -> dict[str, str]:
    """Refuses torch's distributed state dicts, which would take each rank's slice for a replica of
    the whole.
    """
    if any(released_in(inner) for inner in plain_modules(module)):
        refuse(
            "get_optimizer_state_dict, set_optimizer_state_dict, get_state_dict and the like "
            "(torch.distributed.checkpoint.state_dict)",
            "every rank's chunk has the same name, so one rank's values would stand for all",
            "zero3.full_optimizer_state_dict(model, optimizer) and zero3.full_state_dict(model), "
            "their load_ twins, or save_checkpoint",
        )
    return method()


def _before_load_state_dict(module: nn.Module, *_: object) -> None:
    if released_in(module):
        refuse_load_state_dict()


def enter_model(module: nn.Module) -> None:
    """Notes that a layer has a place in another module from now on."""
    module.__dict__[IN_MODEL] = True


def _check_new_module(module: nn.Module, name: str, new: nn.Module | None) -> None:
    """Raises if a new module in a sharded model has parameters of its own: they would be neither
    sharded, nor reduced, nor loaded.
    """
    if name == "_orig_mod" and new is not None:
        leave_untraced()  # torch.compile makes its wrapper
    if isinstance(new, nn.Module) and WRAPPED in vars(new):
        enter_model(new)
    if GUARDED in vars(module) and isinstance(new, nn.Module):
        added = new.named_parameters()
        _check_strangers(module, [f"{name}.{inner}" for inner, p in added if not _is_sharded(p)])


def _check_new_parameter(module: nn.Module, name: str, new: nn.Parameter | None) -> None:
    if GUARDED not in vars(module) or new is None or _is_sharded(new):
        return
    # A new object under the name of one that is shown is an error too, when the layer's are shown
    # next. That of one that is hidden has left its place already: then it gets that back.
    if name not in {known for known, held in parameters_of(module) if held is not None}:
        _check_strangers(module, [name])


def _check_strangers(module: nn.Module, names: list[str]) -> None:
    if names:
        raise RuntimeError(
            f"this {type(module).__name__} belongs to a sharded model, and was to get parameters "
            f"that are not: {named(names)}. Each rank would train them alone, and no checkpoint "
            "would hold them. Change the model, or add adapters (peft's get_peft_model, "
            "add_adapter, load_adapter), before it is sharded."
        )


def _is_sharded(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "zero3_state")


# torch knows no such hooks for one module alone. These look at marked modules only.
nn.modules.module.register_module_module_registration_hook(_check_new_module)
nn.modules.module.register_module_parameter_registration_hook(_check_new_parameter)
