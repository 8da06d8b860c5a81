"""A layer's parameters in its modules: found, checked, shown while the layer is fetched, hidden while it is not."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .autograd import restore_versions
from .chunk import Chunk
from .released import ReleasedParameter, refuse_values

__all__: list[str] = []

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # hold, but are never called
_ORDER = "_zero3_order"  # in a module's __dict__: the names of its parameters


class Owner(weakref.ref[Any]):
    """On a parameter: the state of its layer, not held. A copy of the parameter, or a pickle, has none."""

    __slots__ = ()

    def __deepcopy__(self, memo: object) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class _Method:
    """A function of one parameter alone, as its attribute. It does not hold the parameter."""

    __slots__ = ("_function", "_parameter")

    def __init__(self, function: Callable[..., Any], parameter: nn.Parameter) -> None:
        self._function = function
        self._parameter = weakref.ref(parameter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._parameter(), *args, **kwargs)


def mark_sharded(parameter: nn.Parameter, name: str, state: object) -> None:
    """What a sharded parameter carries: its name for errors, its layer (`state`, not held), and two methods of its own."""
    attributes = {"zero3_name": name, "zero3_state": Owner(state)}
    attributes |= {"set_": _Method(_set_unless_itself, parameter), "__getstate__": _Method(_own_attributes, parameter)}
    parameter.__dict__.update(attributes)


def _set_unless_itself(parameter: nn.Parameter, *source: Any, **options: Any) -> Tensor:
    """`parameter.set_(parameter)` changes nothing, and so it must not count as a write.

    torch's `register_parametrization` does it, and peft registers one in every forward of fused experts. (A released parameter is
    asked here because torch does not send this operation through `__torch_function__`.)
    """
    if isinstance(parameter, ReleasedParameter):
        refuse_values(parameter, "set_")
    itself = len(source) == 1 and source[0] is parameter
    return parameter if itself else Tensor.set_(parameter, *source, **options)


def _own_attributes(parameter: nn.Parameter) -> dict[str, Any]:
    """What a pickle of the parameter holds beside its values: the user's own marks."""
    ours = ("zero3_name", "zero3_state", "set_", "__getstate__")
    return {name: value for name, value in vars(parameter).items() if name not in ours}


@dataclass(eq=False)
class ParameterSites:
    """One parameter and all the places in the layer's modules that have it (several, if it is tied)."""

    name: str
    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def show(self, value: Tensor) -> None:
        """The parameter is itself again, with the values of `value` (its slot of the full buffer, no copy)."""
        self.parameter.__class__ = nn.Parameter
        self.parameter.data = value
        for module, attribute in self.places:
            if module.__dict__.pop(attribute, None) is not self.parameter:
                raise RuntimeError(
                    f"{self.name}: the module's attribute {attribute!r} was replaced after wrapping. A wrapped parameter "
                    "stays one object; change its values inside `with zero3.full_params(module, writeback=True):`."
                )
            module._parameters[attribute] = self.parameter

    def hide(self, stand_in: Tensor) -> None:
        """Metadata stays readable, values raise; `model.parameters()` no longer finds it. Twice is as good as once."""
        self.parameter.__class__ = nn.Parameter
        self.parameter.grad = None
        self.parameter.data = stand_in
        for module, attribute in self.places:
            module._parameters.pop(attribute, None)
            module.__dict__[attribute] = self.parameter
        self.parameter.__class__ = ReleasedParameter

    def replaced(self) -> bool:
        """Whether, while it is shown, another object stands in one of its places."""
        return any(module._parameters.get(attribute) is not self.parameter for module, attribute in self.places)

    def replace(self, parameter: nn.Parameter) -> None:
        """For a parameter on the meta device, which can't be given other data: a new object takes its places."""
        parameter.__dict__.update(self.parameter.__dict__)  # users' marks, such as no_weight_decay
        for module, attribute in self.places:
            setattr(module, attribute, parameter)  # not into _parameters: some modules keep lists of their own (LSTM)
        self.parameter = parameter


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """A parameter of a layer: its places in the modules, and the chunk and the slot that hold its values."""

    sites: ParameterSites
    chunk: Chunk
    index: int
    stand_in: Tensor  # what the parameter shows while released, in its shape

    @property
    def value(self) -> Tensor:
        return self.chunk.views[self.index]


def show_all(sharded: Iterable[ShardedParameter], versions: Iterable[int]) -> None:
    """Each shows its slot; what graphs have saved of them counts as unchanged, if it was saved at these versions."""
    saved, saved_at = [], []
    for each, version in zip(sharded, versions, strict=True):
        each.sites.show(each.chunk.full.views[each.index])
        if each.chunk.guarded:
            saved.append(each.sites.parameter)
            saved_at.append(version)
    restore_versions(saved, saved_at)


def named(names: Sequence[str], most: int = 6) -> str:
    """For errors: the first of many names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def is_callable(module: nn.Module) -> bool:
    """Whether it has a forward. Lists and dicts of modules or parameters have none, nor has a bare `nn.Module()`."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def own_modules(
    module: nn.Module, is_layer: Callable[[nn.Module], bool], prefix: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """`module` and those below it, in order, once each; wrapped layers inside keep their own, so they are left out."""
    seen = set() if seen is None else seen
    if module in seen or is_layer(module):
        return
    seen.add(module)
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from own_modules(child, is_layer, f"{prefix}.{name}" if prefix else name, seen)


def find_parameters(
    module: nn.Module,
    is_layer: Callable[[nn.Module], bool],
    elsewhere: Container[int] = (),
    borrowed: Iterable[ParameterSites] = (),
) -> list[ParameterSites]:
    """The parameters that belong to `module` itself, in order; a tied one once, under its first name.

    Left out are those whose ids are in `elsewhere`; `borrowed` ones, which stand in other layers, come first.
    """
    found = {id(sites.parameter): ParameterSites(sites.name, sites.parameter, list(sites.places)) for sites in borrowed}
    for prefix, owner in own_modules(module, is_layer):
        for attribute, parameter in [*owner._parameters.items(), *released_in(owner)]:
            if parameter is None or id(parameter) in elsewhere:
                continue
            name = f"{prefix}.{attribute}" if prefix else attribute
            sites = found.setdefault(id(parameter), ParameterSites(name, parameter))
            if (owner, attribute) not in sites.places:
                sites.places.append((owner, attribute))
    return list(found.values())


def remember_order(parameters: Iterable[ParameterSites]) -> None:
    """Before the first parameter of a module is hidden: several layers, or chunks, may show and hide them in another order."""
    for module in {module for sites in parameters for module, _ in sites.places}:
        module.__dict__.setdefault(_ORDER, tuple(module._parameters))


def restore_order(parameters: Iterable[ParameterSites]) -> None:
    """The parameters that are shown stand as they did before wrapping: state dicts have an order."""
    for module in {module for sites in parameters for module, _ in sites.places}:
        ordered = {name: parameter for name, parameter in parameters_of(module) if name in module._parameters}
        if list(ordered) != list(module._parameters):
            module._parameters.clear()
            module._parameters.update(ordered)


def parameters_of(module: nn.Module) -> list[tuple[str, nn.Parameter | None]]:
    """The module's own parameters, shown and released, in the order that they had before wrapping."""
    found: dict[str, nn.Parameter | None] = {**module._parameters, **dict(released_in(module))}
    first = [name for name in vars(module).get(_ORDER, ()) if name in found]
    return [(name, found[name]) for name in dict.fromkeys([*first, *found])]


def released_in(module: nn.Module) -> list[tuple[str, ReleasedParameter]]:
    """The parameters that `module` has lent to a layer."""
    return [(name, value) for name, value in vars(module).items() if isinstance(value, ReleasedParameter)]


def check_parameters(parameters: list[ParameterSites], dtype: torch.dtype | None, label: str) -> None:
    """Raises ValueError, naming the parameter, for what can't be sharded; touches nothing."""
    for sites in parameters:
        parameter = sites.parameter
        if isinstance(parameter, ReleasedParameter):
            raise ValueError(
                f"parameter {sites.name!r} of {label} is already sharded, as {parameter.zero3_name}. Wrap a module once; if the "
                "parameter is tied across layers, put both into one Zero3Layer, or use zero3.shard(model)."
            )
        if type(parameter) is not nn.Parameter or type(parameter.data) is not Tensor:
            raise ValueError(
                f"parameter {sites.name!r} is a {type(parameter).__name__} (data: {type(parameter.data).__name__}), expected a "
                "plain torch.nn.Parameter: subclasses hold more than flat values. Convert it before wrapping, or leave it out."
            )
        if dtype is not None and parameter.requires_grad and parameter.dtype != dtype:
            raise ValueError(
                f"trainable parameter {sites.name!r} is {parameter.dtype}, expected dtype={dtype}: dtype checks what the "
                "optimizer updates, it converts nothing. Convert the module before wrapping, or drop the argument."
            )
    _check_overlap([sites for sites in parameters if not sites.parameter.is_meta and sites.parameter.numel()])


def _check_overlap(parameters: list[ParameterSites]) -> None:
    spans = []
    for sites in parameters:
        parameter = sites.parameter
        if _overlaps_itself(parameter):
            raise ValueError(
                f"parameter {sites.name!r} overlaps itself (shape {tuple(parameter.shape)}, stride {parameter.stride()}): "
                "a tensor with several names for one element can't be trained. Use .clone() before wrapping."
            )
        last = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        spans.append((parameter.data_ptr(), parameter.data_ptr() + (last + 1) * parameter.element_size(), sites))
    reached: list[tuple[int, ParameterSites]] = []  # spans that reach beyond where the next one starts
    for start, stop, sites in sorted(spans, key=lambda span: span[:2]):
        reached = [(end, other) for end, other in reached if end > start]
        for _, other in reached:
            if _share_elements(other.parameter, sites.parameter):
                raise ValueError(
                    f"parameters {other.name!r} and {sites.name!r} overlap in memory but are two objects. Make them one "
                    "Parameter if they are tied, or .clone() one of them."
                )
        reached.append((stop, sites))


def _overlaps_itself(tensor: Tensor) -> bool:
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return len(set(_addresses(tensor).tolist())) < tensor.numel()
        extent += (size - 1) * stride
    return False


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """Exactly: interleaved columns of one buffer cover each other's range without sharing an element."""
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _addresses(tensor: Tensor) -> Tensor:
    """Where every element lies, in bytes."""
    index = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        index = index[..., None] + torch.arange(size) * stride * tensor.element_size()
    return index.flatten()
