"""A layer's parameters in its modules. They are shown while the layer is fetched, and hidden while
it is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .autograd import restore_versions
from .chunk import Chunk
from .released import ReleasedParameter
from .sites import ParameterSites

__all__: list[str] = []

_ORDER = "_zero3_order"  # in a module's __dict__: the names of its parameters


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
