"""A layer's parameters in its modules. They are found, checked, shown while the layer is fetched,
and hidden while it is not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .autograd import restore_versions
from .chunk import Chunk
from .released import ReleasedParameter
from .sites import ParameterSites

__all__: list[str] = []

# hold, but are never called
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_ORDER = "_zero3_order"  # in a module's __dict__: the names of its parameters
WRAPPED = "_zero3_module"  # in a layer's __dict__: the module that it wraps
# Under which torch's wrappers hold the module that they wrap: those of activation checkpointing and
# offloading, and of torch.compile.
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod")
_PREFIX = re.compile(rf"(?<![^.])(?:{'|'.join(_WRAPPED)})\.")


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A layer's parameter: its places in the modules, its chunk, and the number of its slot
    there.
    """

    sites: ParameterSites
    chunk: Chunk
    index: int
    stand_in: Tensor  # the parameter's data while it is released, in its shape

    @property
    def value(self) -> Tensor:
        return self.chunk.views[self.index]


def show_all(sharded: Iterable[ShardedParameter], versions: Iterable[int]) -> None:
    """[fetch 5] Shows each parameter, and sets its version: graphs that saved the parameter at this
    version stay valid.
    """
    saved, saved_at = [], []
    for each, version in zip(sharded, versions, strict=True):
        sites, chunk = each.sites, each.chunk
        sites.show(chunk.full.views[each.index])
        if chunk.tracks_versions:
            saved.append(sites.parameter)
            saved_at.append(version)
    restore_versions(tuple(saved), tuple(saved_at))


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


def remember_order(parameters: Iterable[ParameterSites]) -> None:
    """Stores the order of each module's parameters, before any of them is hidden."""
    for module in {module for sites in parameters for module, _ in sites.places}:
        module.__dict__.setdefault(_ORDER, tuple(module._parameters))


def shown_out_of_order(parameters: Sequence[ShardedParameter]) -> list[nn.Module]:
    """The modules that may list their parameters in another order than before wrapping, when these
    are shown one after another: chunk by chunk, beside some that are ignored or another layer's.
    """
    shown: dict[nn.Module, list[str]] = {}
    for module, name in (place for each in parameters for place in each.sites.places):
        shown.setdefault(module, []).append(name)
    return [
        module
        for module, names in shown.items()
        if names != [n for n in vars(module)[_ORDER] if module._parameters.get(n, n) is not None]
    ]


def restore_order(module: nn.Module) -> None:
    """Puts a module's shown parameters into the order that they had before wrapping."""
    listed = module._parameters
    ordered = {name: each for name, each in parameters_of(module) if name in listed}
    listed.clear()
    listed.update(ordered)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that a layer wraps, or `module` itself if it is no layer."""
    inner: nn.Module = vars(module).get(WRAPPED, module)
    return inner


def plain_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules of the unsharded model: for each layer the module that it wraps."""
    return map(unwrapped, model.modules())


def parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter | None]]:
    """The module's own parameters, shown and released, in their order before wrapping."""
    found: dict[str, nn.Parameter | None] = {**module._parameters, **dict(released_in(module))}
    first = [name for name in vars(module).get(_ORDER, ()) if name in found]
    return [(name, found[name]) for name in dict.fromkeys([*first, *found])]


def released_in(module: nn.Module) -> list[tuple[str, ReleasedParameter]]:
    """The released parameters that `module` itself has."""
    return [
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, ReleasedParameter)
    ]
