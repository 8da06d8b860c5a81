"""Which submodules of a model become layers, and which parameters stand in several of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn

from .core.parameters import ParameterSites, own_modules

__all__: list[str] = []

Layers = type[nn.Module] | Sequence[type[nn.Module] | nn.Module] | Callable[[str, nn.Module], bool] | None

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # hold, but are never called


class Named(NamedTuple):
    name: str
    module: nn.Module


def choose(model: nn.Module, layers: Layers) -> list[Named]:
    """The modules that become layers, each once, outer before inner; never the model itself.

    Raises:
        ValueError: nothing is found, or something that can't be a layer.
        TypeError: `layers` is no class, modules or predicate.
    """
    inside = [Named(name, module) for name, module in model.named_modules() if module is not model]
    if layers is None:
        wanted = _blocks_and_ends(model, inside)
    elif callable(layers) and not isinstance(layers, (type, nn.Module)):
        wanted = {id(module) for name, module in inside if layers(name, module)}
    else:
        wanted = _modules_named(inside, [layers] if isinstance(layers, (type, nn.Module)) else layers)
    chosen = [each for each in inside if id(each.module) in wanted]
    if not chosen:
        kinds = dict.fromkeys(type(module).__name__ for _, module in inside if not isinstance(module, CONTAINERS))
        raise ValueError(f"layers={layers!r} matches no submodule of this {type(model).__name__}, which has: {', '.join(kinds) or 'none'}")
    for name, module in chosen:
        if isinstance(module, CONTAINERS):
            raise ValueError(
                f"layers matches {name!r}, a {type(module).__name__}: that is never called, so it can't be a layer. Name its elements"
            )
    return chosen


def _modules_named(inside: list[Named], layers: Any) -> set[int]:
    if not isinstance(layers, Iterable) or isinstance(layers, (str, bytes)):
        raise TypeError(
            f"layers must be a module class, several, modules, or a predicate (name, module) -> bool; "
            f"found {layers!r} of type {type(layers).__name__}"
        )
    items = list(layers)
    wrong = [item for item in items if not isinstance(item, nn.Module) and not (isinstance(item, type) and issubclass(item, nn.Module))]
    if wrong:
        raise TypeError(f"layers holds {wrong[0]!r} of type {type(wrong[0]).__name__}, expected module classes or modules")
    classes = tuple(item for item in items if isinstance(item, type))
    modules = [item for item in items if not isinstance(item, type)]
    known = {id(module) for _, module in inside}
    strangers = [module for module in modules if id(module) not in known]
    if strangers:
        raise ValueError(f"layers holds a {type(strangers[0]).__name__} that is no submodule of the model")
    return {id(module) for _, module in inside if isinstance(module, classes)} | {id(module) for module in modules}


def _blocks_and_ends(model: nn.Module, inside: list[Named]) -> set[int]:
    blocks = _blocks(model, inside)
    within = {id(inner) for block in blocks for inner in block.modules()}
    counts = Counter(id(p) for _, module in [("", model), *inside] for p in module._parameters.values() if p is not None)
    ends = [end for end in _ends(model, inside) if id(end) not in within and _mostly_its_own(end, counts)]
    return {id(module) for module in [*blocks, *ends]}


def _blocks(model: nn.Module, inside: list[Named]) -> list[nn.Module]:
    """The elements of the outermost module lists that hold a tenth of the parameters at least, or, if none does, of the largest."""
    lists: list[tuple[int, str, nn.ModuleList]] = []
    for name, module in inside:  # outer before inner
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for _, outer, _ in lists):
            lists.append((_numel(module), name, module))
    largest = max((size for size, _, _ in lists), default=0)
    if not largest:
        raise ValueError(
            f"no ModuleList of this {type(model).__name__} holds parameters, so which of its modules are blocks is unknown: name them with "
            "layers= (a class, several, modules, or a predicate (name, module) -> bool)"
        )
    least = min(largest, _numel(model) / 10)
    return [block for size, _, module in lists if size >= least for block in module]


def _ends(model: nn.Module, inside: list[Named]) -> list[nn.Module]:
    """Embeddings and heads: what a transformers model says they are, else embeddings anywhere; linear maps right under the model."""
    ends: list[nn.Module | None] = [module for module in model.children() if type(module) is nn.Linear]
    if hasattr(model, "get_input_embeddings"):
        ends += [_ask(model, "get_input_embeddings"), _ask(model, "get_output_embeddings")]
    else:
        ends += [module for _, module in inside if type(module) is nn.Embedding]
    return [end for end in ends if end is not None and end is not model]


def _ask(model: nn.Module, question: str) -> nn.Module | None:
    try:
        answer = getattr(model, question)()
    except (NotImplementedError, AttributeError):  # models without embeddings answer so
        return None
    return answer if isinstance(answer, nn.Module) else None


def _mostly_its_own(module: nn.Module, counts: Counter[int]) -> bool:
    """Whether it would hold most of its parameters as a layer: those that are tied to others go to the root (a head's bias may)."""
    own = sum(p.numel() for p in module.parameters() if counts[id(p)] == 1)
    return own > 0 and 2 * own >= _numel(module)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def tied_across(model: nn.Module, chosen: list[Named]) -> dict[int, ParameterSites]:
    """Parameters that stand in more than one layer (the root counts as one), by id, with all their places, under their first names."""
    boundaries = {id(module) for _, module in chosen}
    units: dict[int, set[int]] = {}
    parameters: dict[int, ParameterSites] = {}
    for prefix, unit in [Named("", model), *chosen]:
        for name, module in own_modules(unit, lambda m, unit=unit: m is not unit and id(m) in boundaries, prefix):  # type: ignore[misc]
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    units.setdefault(id(parameter), set()).add(id(unit))
                    sites = parameters.setdefault(id(parameter), ParameterSites(f"{name}.{attribute}" if name else attribute, parameter))
                    if (module, attribute) not in sites.places:
                        sites.places.append((module, attribute))
    return {key: parameters[key] for key, found in units.items() if len(found) > 1}
