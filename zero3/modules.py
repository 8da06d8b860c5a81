"""A model's modules: their names without torch's wrappers, and whose parameters are whose."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

from torch import nn

from .core.parameters import released_in
from .core.sites import ParameterSites

__all__: list[str] = []

# hold, but are never called
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
WRAPPED = "_zero3_module"  # in a layer's __dict__: the module that it wraps
# Under which torch's wrappers hold the module that they wrap: those of activation checkpointing and
# offloading, and of torch.compile.
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")
_PREFIX = re.compile(rf"(?<![^.])(?:{'|'.join(_WRAPPED)})\.")


def own_name(name: str) -> str:
    """The name that a tensor has in the model without torch's wrappers: they come and go, files and
    options stay.
    """
    return _PREFIX.sub("", name)


def own_module_name(name: str) -> str:
    """Works as `own_name`, for a module's name."""
    return own_name(f"{name}.").removesuffix(".")


def wrapped_in(module: nn.Module) -> nn.Module | None:
    """Returns the module inside one of torch's wrappers, or None if `module` is no such wrapper."""
    return next(
        (child for name in _WRAPPED if (child := module._modules.get(name)) is not None), None
    )


def named(names: Sequence[str], most: int = 6) -> str:
    """Returns the first of many names, and the number of the others, for errors."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def is_callable(module: nn.Module) -> bool:
    """Whether it has a forward. Lists and dicts of modules or parameters have none, nor has a bare
    `nn.Module()`.
    """
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def dotted(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def own_modules(
    module: nn.Module,
    is_layer: Callable[[nn.Module], bool],
    prefix: str = "",
    seen: set[nn.Module] | None = None,
) -> Iterator[tuple[str, nn.Module]]:
    """`module` and the modules inside it, in order, each once. Layers inside it are left out, with
    their modules.

    Names are those of the model without torch's wrappers.
    """
    seen = set() if seen is None else seen
    if module in seen or is_layer(module):
        return
    seen.add(module)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from own_modules(
                child, is_layer, prefix if name in _WRAPPED else dotted(prefix, name), seen
            )


def find_parameters(
    module: nn.Module,
    is_layer: Callable[[nn.Module], bool],
    elsewhere: Container[int] = (),
    borrowed: Iterable[ParameterSites] = (),
) -> list[ParameterSites]:
    """The parameters that belong to `module`'s own layer, in order. A tied parameter comes once,
    under its first name.

    Parameters with their ids in `elsewhere` are left out. `borrowed` parameters, which are inside
    other layers, come first.
    """
    found = {
        id(sites.parameter): ParameterSites(sites.name, sites.parameter, list(sites.places))
        for sites in borrowed
    }
    for prefix, owner in own_modules(module, is_layer):
        for attribute, parameter in [*owner._parameters.items(), *released_in(owner)]:
            if parameter is None or id(parameter) in elsewhere:
                continue
            sites = found.setdefault(
                id(parameter), ParameterSites(dotted(prefix, attribute), parameter)
            )
            if (owner, attribute) not in sites.places:
                sites.places.append((owner, attribute))
    return list(found.values())


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that a layer wraps, or `module` itself if it is no layer."""
    inner: nn.Module = vars(module).get(WRAPPED, module)
    return inner


def plain_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules of the unsharded model: for each layer the module that it wraps."""
    return map(unwrapped, model.modules())
