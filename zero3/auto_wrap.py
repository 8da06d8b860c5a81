"""Chooses the submodules of a model that become layers, and finds the parameters that are tied
across them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from .core.sites import ParameterSites
from .modules import CONTAINERS, dotted, is_callable, own_modules

__all__: list[str] = []

Layers = (
    type[nn.Module]
    | Sequence[type[nn.Module] | nn.Module | Sequence[nn.Module]]
    | Callable[[str, nn.Module], bool]
    | None
)


FEW = 16  # a model's trainable elements are few if this many times as many are in it


class Candidate(NamedTuple):
    name: str
    module: nn.Module


def choose(model: nn.Module, layers: Layers) -> list[tuple[Candidate, ...]]:
    """Returns the modules of each layer: mostly one. Each module stands there once, outer before
    inner, and the model itself does not.

    Raises:
        ValueError: No module is found, or one can't be a layer.
        TypeError: `layers` is neither a class, several classes or modules, nor a predicate.
    """
    inside = [
        Candidate(name, module) for name, module in model.named_modules() if module is not model
    ]
    # torch.compile's wrapper is called in place of the module in it, and calls what it has found
    # there when it was made
    wrappers = {
        id(inner): module
        for _, module in inside
        if (inner := module._modules.get("_orig_mod")) is not None
    }
    together: dict[int, tuple[nn.Module, ...]] = {}
    if layers is None:
        wanted = _automatic(model, inside)
    elif callable(layers) and not isinstance(layers, (type, nn.Module)):
        wanted = {id(module) for name, module in inside if layers(name, module)}
    else:
        items = _checked([layers] if isinstance(layers, (type, nn.Module)) else layers)
        groups: list[tuple[nn.Module, ...]] = [item for item in items if isinstance(item, tuple)]
        together = _together(
            [tuple(wrappers.get(id(each), each) for each in group) for group in groups]
        )
        wanted = _modules_named(
            inside,
            [each for item in items for each in (item if isinstance(item, tuple) else [item])],
        )
    wanted = {id(wrappers[module]) if module in wrappers else module for module in wanted}
    chosen = [each for each in inside if id(each.module) in wanted]
    if not chosen:
        kinds = dict.fromkeys(type(module).__name__ for _, module in inside if is_callable(module))
        raise ValueError(
            f"layers={layers!r} matches no submodule of this {type(model).__name__}, which has: "
            f"{', '.join(kinds) or 'none'}"
        )
    for name, module in chosen:
        if isinstance(module, CONTAINERS) and not is_callable(module):
            raise ValueError(
                f"layers matches {name!r}, a {type(module).__name__}: that is never called, so it "
                "can't be a layer. Name its elements"
            )
    named = {id(each.module): each for each in inside}
    parts = [
        tuple(named[id(each)] for each in together.get(id(one.module), [one.module]))
        for one in chosen
    ]
    return list(dict.fromkeys(parts))


def _checked(layers: Any) -> list[Any]:
    """The items of `layers`: classes, modules, and tuples of modules that form one layer
    together.
    """
    if not isinstance(layers, Iterable) or isinstance(layers, (str, bytes)):
        raise TypeError(
            "layers must be a module class, several, modules, or a predicate (name, module) -> "
            f"bool; found {layers!r} of type {type(layers).__name__}"
        )
    items = [tuple(item) if isinstance(item, list) else item for item in layers]
    for item in items:
        together = item if isinstance(item, tuple) else ()
        wrong = [each for each in together if not isinstance(each, nn.Module)]
        if wrong or not (
            isinstance(item, (nn.Module, tuple))
            or (isinstance(item, type) and issubclass(item, nn.Module))
        ):
            found = wrong[0] if wrong else item
            raise TypeError(
                f"layers holds {found!r} of type {type(found).__name__}, expected "
                + (
                    "modules alone in what becomes one layer"
                    if wrong
                    else "module classes or modules, or tuples of modules"
                )
            )
    return items


def _together(groups: list[tuple[nn.Module, ...]]) -> dict[int, tuple[nn.Module, ...]]:
    """For each module of `groups`, by id: the modules that it forms one layer with."""
    together: dict[int, tuple[nn.Module, ...]] = {}
    for group in groups:
        within = {
            id(inner) for module in group for inner in module.modules() if inner is not module
        }
        for module in group:
            kind = type(module).__name__
            if id(module) in together or group.count(module) > 1:
                raise ValueError(
                    f"layers holds a {kind} twice among the modules that become one layer "
                    "together: name each once"
                )
            if id(module) in within:
                raise ValueError(
                    f"layers holds a {kind} together with a module that it is inside of: name the "
                    "outer one alone"
                )
        together.update({id(module): group for module in group})
    return together


def _modules_named(inside: list[Candidate], items: list[Any]) -> set[int]:
    classes = tuple(item for item in items if isinstance(item, type))
    modules = [item for item in items if not isinstance(item, type)]
    known = {id(module) for _, module in inside}
    strangers = [module for module in modules if id(module) not in known]
    if strangers:
        raise ValueError(
            f"layers holds a {type(strangers[0]).__name__} that is no submodule of the model"
        )
    return {id(module) for _, module in inside if isinstance(module, classes)} | {
        id(module) for module in modules
    }


# -- the automatic choice


def _automatic(model: nn.Module, inside: list[Candidate]) -> set[int]:
    """Chooses blocks, then embeddings and heads, then other modules until the root's own layer is
    no larger than the largest block.
    """
    counts = Counter(
        id(p)
        for _, module in [("", model), *inside]
        for p in module._parameters.values()
        if p is not None
    )
    blocks = _blocks(model, inside, counts)
    within = {id(inner) for block in blocks for inner in block.modules()}
    largest = max(_numel(block) for block in blocks)
    ends = [
        end
        for end in _ends(model, inside, largest // 2)
        if id(end) not in within and _mostly_its_own(end, counts)
    ]
    chosen = {id(module) for module in [*blocks, *ends]}
    return chosen | _large_parts(model, chosen, counts, largest)


def _blocks(model: nn.Module, inside: list[Candidate], counts: Counter[int]) -> list[nn.Module]:
    """Returns the elements of each outermost module list that holds a tenth of the parameters, or
    of the largest list if none does. Then it adds those of each list of blocks that holds a tenth
    as much as the largest of these elements.
    """
    found = _outermost_lists(
        inside, lambda element: any(counts[id(p)] == 1 for p in element.parameters())
    )
    # if all blocks are tied to others
    found = found or _outermost_lists(inside, lambda element: _numel(element) > 0)
    lists = [(sum(_numel(element) for element in elements), elements) for elements in found]
    most = max((size for size, _ in lists), default=0)
    if not most:
        raise ValueError(
            f"no ModuleList of this {type(model).__name__} holds parameters, so which of its "
            "modules are blocks is unknown: name them with layers= (a class, several, modules, "
            "or a predicate (name, module) -> bool)"
        )
    least = min(most, _numel(model) / 10)
    largest = max(
        _numel(element) for size, elements in lists if size >= least for element in elements
    )
    wanted = [
        elements
        for size, elements in lists
        if size >= least or (size >= largest / 10 and _are_blocks(elements, largest))
    ]
    return [element for elements in wanted for element in elements]


def _outermost_lists(
    inside: list[Candidate], holds_something: Callable[[nn.Module], bool]
) -> list[list[nn.Module]]:
    """Returns the called modules of each module list that is in no other list, if there are any
    that hold something.
    """
    names: list[str] = []
    lists: list[list[nn.Module]] = []
    for name, module in inside:  # outer before inner
        nested = any(name.startswith(f"{outer}.") for outer in names)
        if (
            isinstance(module, nn.ModuleList)
            and not isinstance(module, ParametrizationList)
            and not nested
        ):
            names.append(name)
            lists.append([element for element in called_in(module) if holds_something(element)])
    return [elements for elements in lists if elements]


def _are_blocks(elements: list[nn.Module], largest: int) -> bool:
    """Whether elements contain modules, or are large. (Fifty embeddings of a few words are better
    fetched together.)
    """
    return (
        any(_numel(child) for element in elements for child in element.children())
        or _numel(elements[0]) >= largest / 20
    )


def called_in(module: nn.Module) -> list[nn.Module]:
    """Returns the outermost modules inside `module` that have a forward. A list may hold lists,
    which have none.
    """
    children = [child for child in module._modules.values() if child is not None]
    return [
        called
        for child in children
        for called in ([child] if is_callable(child) else called_in(child))
    ]


def _ends(model: nn.Module, inside: list[Candidate], large: int) -> list[nn.Module]:
    """Returns embeddings and heads: those that a transformers model names, or else every embedding;
    each `nn.Linear` directly in the model; and every embedding of `large` parameters or more.
    """
    ends: list[nn.Module] = [module for module in model.children() if type(module) is nn.Linear]
    ends += [
        module
        for _, module in inside
        if isinstance(module, nn.Embedding) and _numel(module) >= large
    ]
    if hasattr(model, "get_input_embeddings"):
        for embeddings in (embeddings_of(model, "input"), embeddings_of(model, "output")):
            if embeddings is not None:  # some models have a list of them
                ends += [embeddings] if is_callable(embeddings) else called_in(embeddings)
    else:
        ends += [module for _, module in inside if type(module) is nn.Embedding]
    return [end for end in ends if end is not model]


def embeddings_of(model: nn.Module, way: Literal["input", "output"]) -> nn.Module | None:
    """What the model's `get_input_embeddings()` returns, or `get_output_embeddings()`: its head."""
    try:
        found = getattr(model, f"get_{way}_embeddings")()
    except (NotImplementedError, AttributeError):  # models without embeddings answer so
        return None
    return found if isinstance(found, nn.Module) else None


def _mostly_its_own(module: nn.Module, counts: Counter[int]) -> bool:
    """Whether the module, as a layer, would keep most of its parameters. (Those that are tied to
    others belong to the root.)
    """
    own = sum(p.numel() for p in module.parameters() if counts[id(p)] == 1)
    return own > 0 and 2 * own >= _numel(module)


def _large_parts(
    model: nn.Module, chosen: set[int], counts: Counter[int], largest: int
) -> set[int]:
    """Chooses further modules, the largest first, until the root's own layer is no larger than the
    largest block, if possible.

    The root's own layer stays in memory from the forward to the end of backward, so it should be
    small.
    """
    outside = own_modules(model, lambda module: id(module) in chosen)
    left = {
        id(p): p.numel()
        for _, module in outside
        for p in module._parameters.values()
        if p is not None
    }
    parts = sorted(_parts(model, chosen, counts, largest), key=_numel, reverse=True)
    root, wanted = sum(left.values()), set[int]()
    # a module is worth its transfers only if it is not small beside the largest block, and beside
    # what stays in the root
    least = max(largest, root - sum(map(_numel, parts))) / 20
    for part in parts:
        if root <= largest or _numel(part) < least:
            break
        root -= _numel(part)
        wanted.add(id(part))
    return wanted


def _parts(module: nn.Module, chosen: set[int], counts: Counter[int], most: int) -> list[nn.Module]:
    """Returns the outermost modules that could be layers: they are called, contain no layers, and
    keep most of their parameters. A module that is larger than `most` is split if possible.
    """
    found: dict[int, nn.Module] = {}
    for child in module.children():
        if id(child) in chosen:
            continue
        whole = (
            is_callable(child)
            and not any(id(inner) in chosen for inner in child.modules())
            and _mostly_its_own(child, counts)
        )
        if whole and (_numel(child) <= most or not _can_be_split(child, most)):
            found[id(child)] = child
        elif _calls_its_children(child):
            found |= {id(inner): inner for inner in _parts(child, chosen, counts, most)}
    return list(found.values())


def _can_be_split(module: nn.Module, most: int) -> bool:
    """Whether its children are called, and its own parameters alone are no more than `most`."""
    direct = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return direct <= most and any(True for _ in module.children()) and _calls_its_children(module)


def _calls_its_children(module: nn.Module) -> bool:
    """Whether the module calls its children. Attention and parametrized modules read their
    children's parameters without a call.
    """
    return not isinstance(module, nn.MultiheadAttention) and not is_parametrized(module)


def _numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def few_that_train(parameters: Sequence[ParameterSites]) -> list[ParameterSites]:
    """Returns those of a model's `parameters` that train, if they are less than a sixteenth of all
    elements: adapters.
    """
    trained = [sites for sites in parameters if sites.parameter.requires_grad]
    few = FEW * sum(sites.parameter.numel() for sites in trained) < sum(
        sites.parameter.numel() for sites in parameters
    )
    return trained if few else []


def tied_across(model: nn.Module, chosen: list[tuple[nn.Module, ...]]) -> dict[int, ParameterSites]:
    """Returns the parameters that are in several layers (the root counts as one), by id, with all
    their places and their first name.
    """
    named = {id(module): name for name, module in model.named_modules()}
    boundaries = {id(module) for part in chosen for module in part}
    units: dict[int, set[int]] = {}
    parameters: dict[int, ParameterSites] = {}
    for number, unit in (
        (number, each) for number, part in enumerate([(model,), *chosen]) for each in part
    ):
        for name, module in own_modules(
            unit,
            lambda m, unit=unit: m is not unit and id(m) in boundaries,  # type: ignore[misc]
            named[id(unit)],
        ):
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    units.setdefault(id(parameter), set()).add(number)
                    sites = parameters.setdefault(
                        id(parameter), ParameterSites(dotted(name, attribute), parameter)
                    )
                    if (module, attribute) not in sites.places:
                        sites.places.append((module, attribute))
    return {key: parameters[key] for key, found in units.items() if len(found) > 1}
